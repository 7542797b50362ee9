/* Copies between boxes in memory, past the cache; the sum of a box's items, each times weights of its indices; and both
   at once. */

/* Copies.

A plain store first reads the line that it writes to: three bytes cross the memory bus for two that count. Streaming
stores do not. But the processor reads ahead best in several places at once, and a row of a few KB is over before it
reads ahead at all. So several rows are copied side by side, and one long row as if it were several. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifndef __x86_64__
#error "no streaming stores are known here; numpy copies instead"
#endif
#include <immintrin.h>

enum { LINE_BYTES = 64, ROWS_AT_ONCE = 8, LONG_ROW_BYTES = 1 << 15 };

typedef struct {
    char *target;
    const char *source;
    size_t num_bytes;
} Row;

/* Copies so many bytes from the beginning of each row: whole lines of the targets. */
typedef void Stream(const Row *rows, int count, size_t num_bytes);

static void stream_16(const Row *rows, int count, size_t num_bytes)
{
    for (size_t at = 0; at < num_bytes; at += LINE_BYTES)
        for (const Row *row = rows; row < rows + count; row++)
            for (size_t part = at; part < at + LINE_BYTES; part += 16)
                _mm_stream_si128((__m128i *)(row->target + part), _mm_loadu_si128((const __m128i *)(row->source + part)));
}

/* A tenth to a fifth faster. */
__attribute__((target("avx512f"))) static void stream_64(const Row *rows, int count, size_t num_bytes)
{
    for (size_t at = 0; at < num_bytes; at += LINE_BYTES)
        for (const Row *row = rows; row < rows + count; row++)
            _mm512_stream_si512((__m512i *)(row->target + at), _mm512_loadu_si512(row->source + at));
}

typedef struct {
    Py_ssize_t length, target_step, source_step; /* in bytes */
} Dim;

typedef struct {
    Dim dims[PyBUF_MAX_NDIM]; /* from the inside out: the first one counts rows */
    int num_dims;
    size_t row_bytes;
    Stream *stream;
} Box;

/* Heads and tails, which share lines with what lies beside the row, are copied as usual. */
static void copy_side_by_side(char *target, const char *source, Dim dim, int count, size_t row_bytes, Stream *stream)
{
    Row rows[ROWS_AT_ONCE];
    size_t whole = row_bytes;
    for (int index = 0; index < count; index++) {
        char *to = target + index * dim.target_step;
        const char *from = source + index * dim.source_step;
        size_t head = -(uintptr_t)to % LINE_BYTES;
        head = head < row_bytes ? head : row_bytes;
        memcpy(to, from, head);
        rows[index] = (Row){to + head, from + head, row_bytes - head};
        whole = rows[index].num_bytes < whole ? rows[index].num_bytes : whole;
    }
    whole -= whole % LINE_BYTES;
    stream(rows, count, whole);
    for (const Row *row = rows; row < rows + count; row++)
        memcpy(row->target + whole, row->source + whole, row->num_bytes - whole);
}

static void copy_long_row(char *target, const char *source, size_t num_bytes, Stream *stream)
{
    Py_ssize_t piece = num_bytes / ROWS_AT_ONCE / LINE_BYTES * LINE_BYTES, done = piece * ROWS_AT_ONCE;
    copy_side_by_side(target, source, (Dim){ROWS_AT_ONCE, piece, piece}, ROWS_AT_ONCE, piece, stream);
    memcpy(target + done, source + done, num_bytes - done);
}

static void copy_box(const Box *box, int num_dims, char *target, const char *source)
{
    const Dim outer = box->dims[num_dims - 1];
    const int long_rows = outer.length < ROWS_AT_ONCE && box->row_bytes >= LONG_ROW_BYTES;
    const Py_ssize_t step = num_dims > 1 || long_rows ? 1 : ROWS_AT_ONCE;
    for (Py_ssize_t index = 0; index < outer.length; index += step) {
        char *to = target + index * outer.target_step;
        const char *from = source + index * outer.source_step;
        Py_ssize_t left = outer.length - index;
        if (num_dims > 1)
            copy_box(box, num_dims - 1, to, from);
        else if (long_rows)
            copy_long_row(to, from, box->row_bytes, box->stream);
        else
            copy_side_by_side(to, from, outer, (int)(left < step ? left : step), box->row_bytes, box->stream);
    }
}

/* What both are, with dims joined that are one in memory. */
static Box described(const Py_buffer *target, const Py_buffer *source)
{
    Box box = {.row_bytes = target->itemsize};
    for (int dim = target->ndim - 1; dim >= 0; dim--) {
        Dim next = {target->shape[dim], target->strides[dim], source->strides[dim]};
        Dim last = box.num_dims ? box.dims[box.num_dims - 1] : (Dim){1, box.row_bytes, box.row_bytes};
        int joins = next.target_step == last.length * last.target_step &&
                    next.source_step == last.length * last.source_step;
        if (next.length == 1)
            continue;
        if (joins && !box.num_dims)
            box.row_bytes *= next.length;
        else if (joins)
            box.dims[box.num_dims - 1].length *= next.length;
        else
            box.dims[box.num_dims++] = next;
    }
    if (!box.num_dims)
        box.dims[box.num_dims++] = (Dim){1, 0, 0};
    return box;
}

/* False, with an exception, unless the shapes are the same and the innermost dim is contiguous. */
static int fit(const Py_buffer *target, const Py_buffer *source)
{
    if (target->ndim != source->ndim || target->itemsize != source->itemsize) {
        PyErr_Format(PyExc_ValueError, "the target has %d dims of %zd-byte items, the source %d of %zd-byte items",
                     target->ndim, target->itemsize, source->ndim, source->itemsize);
        return 0;
    }
    for (int dim = 0; dim < target->ndim; dim++)
        if (target->shape[dim] != source->shape[dim]) {
            PyErr_Format(PyExc_ValueError, "dim %d of the target is %zd long, that of the source %zd", dim,
                         target->shape[dim], source->shape[dim]);
            return 0;
        }
    int inner = target->ndim - 1;
    if (inner >= 0 && target->shape[inner] > 1 &&
        (target->strides[inner] != target->itemsize || source->strides[inner] != source->itemsize)) {
        PyErr_Format(PyExc_ValueError,
                     "the innermost dim is not contiguous: items of %zd bytes lie %zd bytes apart in the target, %zd in "
                     "the source; use numpy.copyto",
                     target->itemsize, target->strides[inner], source->strides[inner]);
        return 0;
    }
    return 1;
}

static PyObject *copy(PyObject *module, PyObject *arguments)
{
    PyObject *into, *from;
    Py_buffer target, source;
    int most_store_bytes = LINE_BYTES;
    if (!PyArg_ParseTuple(arguments, "OO|i:copy", &into, &from, &most_store_bytes) ||
        PyObject_GetBuffer(into, &target, PyBUF_STRIDED))
        return NULL;
    if (PyObject_GetBuffer(from, &source, PyBUF_STRIDED_RO)) {
        PyBuffer_Release(&target);
        return NULL;
    }
    int fits = fit(&target, &source);
    if (fits && target.len) {
        Box box = described(&target, &source);
        box.stream = most_store_bytes >= 64 && __builtin_cpu_supports("avx512f") ? stream_64 : stream_16;
        Py_BEGIN_ALLOW_THREADS
        copy_box(&box, box.num_dims, target.buf, source.buf);
        _mm_sfence(); /* streaming stores are weakly ordered: a process that hears that we are done must see them */
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

/* Weighted sums, modulo 2^52: what a processor multiplies and adds up at once in a 64-bit lane.

The items of a row are taken as they lie in memory, line by line: a line is read once, written once and summed up in
registers, and a row after the other goes by as fast as a plain copy does. */

enum {
    COLUMNS_AT_ONCE = 1 << 11,
    ROW_BYTES_AT_ONCE = 1 << 12,
    LANES = LINE_BYTES / 8,
    PARTS = 4, /* of a lane, of 16 bits each */
    LINES_SIDE_BY_SIDE = 2
};

#define MODULUS ((uint64_t)1 << 52)
/* The upper half of a 4-byte item counts so many times, and not 2^16 times: a sign bit would be 2^31 then, which leaves
20 bits to tell where it is. */
#define UPPER_HALF 0xD1B54A32D192ED03u

/* Weights of so many indices of one dim, as a processor takes them: whole, or by part of each lane. Bits 16 and up of
what is left of a lane at a part are those of the later ones, which the weights of those make up for. */
typedef union {
    uint64_t whole[COLUMNS_AT_ONCE];
    _Alignas(LINE_BYTES) uint64_t lines[ROW_BYTES_AT_ONCE / LINE_BYTES][PARTS][LANES];
} Weights;

typedef struct {
    const char *at;
    char *to;                        /* where they are copied to meanwhile, or NULL */
    Py_ssize_t step, to_step, length; /* from row to row, in bytes; items of a row */
    Py_ssize_t count;
    int past_cache;
    int level; /* the dim whose index each row has, counted from the last one, which is 1; at level 0 all weigh 1 */
    uint64_t first; /* index of the first row */
} Rows;

static inline __attribute__((always_inline)) uint64_t weight_of(int level, uint64_t index)
{
    uint64_t value = (index + ((uint64_t)level << 40)) * 0x9E3779B97F4A7C15u; /* the finaliser of splitmix64 */
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return (value ^ (value >> 31)) | 1;
}

static inline uint64_t weight_of_row(const Rows *rows, Py_ssize_t row)
{
    return rows->level ? weight_of(rows->level, rows->first + row) : 1;
}

/* Returns the sum over all rows of items times weights, times the row's. */
typedef uint64_t SumRows(const Rows *rows, const Weights *weights);

#define SUM_ROWS(name, item, value, wide)                                                                              \
    __attribute__((optimize("O3"), wide)) static uint64_t name(const Rows *rows, const Weights *weights)              \
    {                                                                                                                  \
        uint64_t total = 0;                                                                                            \
        for (Py_ssize_t row = 0; row < rows->count; row++) {                                                           \
            const char *at = rows->at + row * rows->step;                                                              \
            if (rows->to)                                                                                              \
                at = memcpy(rows->to + row * rows->to_step, at, rows->length * sizeof(item));                          \
            const item *items = (const item *)at;                                                                      \
            uint64_t sum = 0;                                                                                          \
            for (Py_ssize_t column = 0; column < rows->length; column++)                                               \
                sum += value(items[column]) * weights->whole[column];                                                  \
            total += sum * weight_of_row(rows, row);                                                                   \
        }                                                                                                              \
        return total;                                                                                                  \
    }

#define BITS(item) ((uint64_t)(item))
#define HALVES(item) (((item) & 0xFFFF) + UPPER_HALF * ((item) >> 16))

#define FOR_ALL_ITEMS(suffix, wide)                                                                                    \
    SUM_ROWS(sum_u1_##suffix, uint8_t, BITS, wide)                                                                     \
    SUM_ROWS(sum_u2_##suffix, uint16_t, BITS, wide)                                                                    \
    SUM_ROWS(sum_u4_##suffix, uint32_t, HALVES, wide)

FOR_ALL_ITEMS(any, unused)
FOR_ALL_ITEMS(256, target("avx2"))
FOR_ALL_ITEMS(512, target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512"))

#define BY_LANES __attribute__((optimize("O3"), target("avx512f,avx512dq,avx512bw,avx512vl,avx512ifma")))

BY_LANES static inline __attribute__((always_inline)) void add_line(__m512i *sums, __m512i line, const uint64_t (*weights)[LANES])
{
    for (int part = 0; part < PARTS; part++)
        sums[part] = _mm512_madd52lo_epu64(sums[part], part ? _mm512_srli_epi64(line, 16 * part) : line,
                                           _mm512_loadu_si512(weights[part]));
}

/* `copies` and `past_cache` are constants where this is called. */
BY_LANES static inline __attribute__((always_inline)) uint64_t sum_by_lanes(const Rows *rows, const Weights *weights,
                                                                            size_t row_bytes, int copies, int past_cache)
{
    const size_t step = LINES_SIDE_BY_SIDE * LINE_BYTES, whole = row_bytes / step * step;
    __m512i total = _mm512_setzero_si512();
    for (Py_ssize_t row = 0; row < rows->count; row++) {
        const char *from = rows->at + row * rows->step;
        char *to = copies ? rows->to + row * rows->to_step : NULL;
        const uint64_t(*line_weights)[PARTS][LANES] = weights->lines;
        __m512i sums[LINES_SIDE_BY_SIDE * PARTS];
        for (int index = 0; index < LINES_SIDE_BY_SIDE * PARTS; index++)
            sums[index] = _mm512_setzero_si512();
        size_t at = 0;
        for (; at < whole; at += step)
            for (int beside = 0; beside < LINES_SIDE_BY_SIDE; beside++, line_weights++) {
                const size_t place = at + beside * LINE_BYTES;
                const __m512i line = _mm512_loadu_si512(from + place);
                if (copies && past_cache)
                    _mm512_stream_si512((__m512i *)(to + place), line);
                else if (copies)
                    _mm512_storeu_si512(to + place, line);
                add_line(sums + beside * PARTS, line, *line_weights);
            }
        for (; at < row_bytes; at += LINE_BYTES, line_weights++) {
            const __mmask64 some = row_bytes - at < LINE_BYTES ? ((__mmask64)1 << (row_bytes - at)) - 1 : ~(__mmask64)0;
            const __m512i line = _mm512_maskz_loadu_epi8(some, from + at);
            if (copies)
                _mm512_mask_storeu_epi8(to + at, some, line);
            add_line(sums, line, *line_weights);
        }
        for (int index = 1; index < LINES_SIDE_BY_SIDE * PARTS; index++)
            sums[0] = _mm512_add_epi64(sums[0], sums[index]);
        const __m512i weight = _mm512_set1_epi64(weight_of_row(rows, row));
        total = _mm512_add_epi64(total, _mm512_mullo_epi64(sums[0], weight));
    }
    return _mm512_reduce_add_epi64(total);
}

BY_LANES static inline __attribute__((always_inline)) uint64_t sum_lanes(const Rows *rows, const Weights *weights,
                                                                         size_t row_bytes)
{
    if (!rows->to)
        return sum_by_lanes(rows, weights, row_bytes, 0, 0);
    if (rows->past_cache && ((uintptr_t)rows->to | rows->to_step) % LINE_BYTES == 0)
        return sum_by_lanes(rows, weights, row_bytes, 1, 1);
    return sum_by_lanes(rows, weights, row_bytes, 1, 0);
}

BY_LANES static uint64_t sum_u2_by_lanes(const Rows *rows, const Weights *weights)
{
    return sum_lanes(rows, weights, rows->length * sizeof(uint16_t));
}

BY_LANES static uint64_t sum_u4_by_lanes(const Rows *rows, const Weights *weights)
{
    return sum_lanes(rows, weights, rows->length * sizeof(uint32_t));
}

/* Weights of so many indices of a dim. */
typedef void Weigh(Weights *weights, int level, uint64_t first, Py_ssize_t length);

#define WEIGH(name, wide)                                                                                              \
    __attribute__((optimize("O3"), wide)) static void name(Weights *weights, int level, uint64_t first,                \
                                                           Py_ssize_t length)                                          \
    {                                                                                                                  \
        for (Py_ssize_t at = 0; at < length; at++)                                                                     \
            weights->whole[at] = weight_of(level, first + at);                                                         \
    }

WEIGH(weigh_any, unused)
WEIGH(weigh_512, target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512"))

/* Items of 2 bytes are a part each, items of 4 bytes two. */
#define WEIGH_LANES(name, parts_of_item)                                                                               \
    BY_LANES static void name(Weights *weights, int level, uint64_t first, Py_ssize_t length)                          \
    {                                                                                                                  \
        enum { ITEMS_OF_LANE = PARTS / parts_of_item, ITEMS_OF_LINE = LANES * ITEMS_OF_LANE };                         \
        for (Py_ssize_t at = 0; at < length; at += ITEMS_OF_LINE) {                                                    \
            uint64_t(*parts)[LANES] = weights->lines[at / ITEMS_OF_LINE];                                              \
            for (int lane = 0; lane < LANES; lane++) {                                                                 \
                uint64_t before = 0;                                                                                   \
                for (int part = 0; part < PARTS; part++) {                                                             \
                    uint64_t weight = weight_of(level, first + at + ITEMS_OF_LANE * lane + part / parts_of_item);      \
                    if (part % parts_of_item)                                                                          \
                        weight *= UPPER_HALF;                                                                          \
                    parts[part][lane] = weight - (before << 16);                                                       \
                    before = weight;                                                                                   \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

WEIGH_LANES(weigh_u2_lanes, 1)
WEIGH_LANES(weigh_u4_lanes, 2)

/* How items are summed up here. */
typedef struct {
    SumRows *sum_rows; /* NULL for items of another kind */
    Weigh *weigh;
} Way;

enum { ANY, AVX2, AVX512, AVX512_IFMA };

static int widest_here(void)
{
    if (!__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl"))
        return __builtin_cpu_supports("avx2") ? AVX2 : ANY;
    return __builtin_cpu_supports("avx512ifma") ? AVX512_IFMA : AVX512;
}

/* With nothing that is wider than `widest`. */
static Way way_of(Py_ssize_t item_bytes, int widest)
{
    const int here = widest_here(), wide = widest < here ? widest : here;
    SumRows *of_u1[] = {sum_u1_any, sum_u1_256, sum_u1_512, sum_u1_512};
    SumRows *of_u2[] = {sum_u2_any, sum_u2_256, sum_u2_512, sum_u2_by_lanes};
    SumRows *of_u4[] = {sum_u4_any, sum_u4_256, sum_u4_512, sum_u4_by_lanes};
    Weigh *weigh[] = {weigh_any, weigh_any, weigh_512, weigh_512};
    if (item_bytes == 1)
        return (Way){of_u1[wide], weigh[wide]};
    if (item_bytes == 2)
        return (Way){of_u2[wide], wide == AVX512_IFMA ? weigh_u2_lanes : weigh[wide]};
    if (item_bytes == 4)
        return (Way){of_u4[wide], wide == AVX512_IFMA ? weigh_u4_lanes : weigh[wide]};
    return (Way){NULL, NULL};
}

typedef struct {
    Py_ssize_t length, step, to_step; /* in bytes */
    int level;                        /* counted from the tensor's last dim, which is 1 */
    uint64_t first;                   /* index in the tensor */
} SummedDim;

enum { MOST_DIMS = 8 };

typedef struct {
    SummedDim dims[MOST_DIMS]; /* as the box lies in memory, its items side by side along the last one */
    int num_dims, past_cache;
    Py_ssize_t item_bytes;
    Way way; /* without a function for a box that cannot be summed up here */
    const char *at;
    char *to; /* where it is copied to meanwhile, or NULL */
    uint64_t total;
} Summed;

/* Of a matrix, or of one row: so many columns at a time that their weights stay in the first cache. What is copied is
summed up from where it is, or from registers: what is read once cannot change in between. */
static uint64_t sum_matrix(const Summed *of, const char *at, char *to, const SummedDim *outer)
{
    const SummedDim *inner = of->dims + of->num_dims - 1;
    const Py_ssize_t item_bytes = of->item_bytes, bytes_at_once = ROW_BYTES_AT_ONCE / item_bytes;
    const Py_ssize_t most = bytes_at_once < COLUMNS_AT_ONCE ? bytes_at_once : COLUMNS_AT_ONCE;
    Weights weights;
    uint64_t total = 0;
    for (Py_ssize_t from = 0; from < inner->length; from += most) {
        const Py_ssize_t width = inner->length - from < most ? inner->length - from : most;
        of->way.weigh(&weights, inner->level, inner->first + from, width);
        const Rows rows = {.at = at + from * item_bytes,
                           .to = to ? to + from * item_bytes : NULL,
                           .step = outer->step,
                           .to_step = outer->to_step,
                           .length = width,
                           .count = outer->length,
                           .past_cache = of->past_cache,
                           .level = outer->level,
                           .first = outer->first};
        total += of->way.sum_rows(&rows, &weights);
    }
    return total;
}

enum { TILE_ROWS = 128, TILE_COLUMNS = 32 };

static void turn_8_by_8(char *target, const char *source, Py_ssize_t target_step, Py_ssize_t source_step)
{
    __m128i row[8], pair[8], four[8];
    for (int at = 0; at < 8; at++)
        row[at] = _mm_loadu_si128((const __m128i *)(source + at * source_step));
    for (int at = 0; at < 4; at++) {
        pair[2 * at] = _mm_unpacklo_epi16(row[2 * at], row[2 * at + 1]);
        pair[2 * at + 1] = _mm_unpackhi_epi16(row[2 * at], row[2 * at + 1]);
    }
    for (int half = 0; half < 2; half++)
        for (int part = 0; part < 2; part++) {
            four[4 * half + 2 * part] = _mm_unpacklo_epi32(pair[4 * half + part], pair[4 * half + 2 + part]);
            four[4 * half + 2 * part + 1] = _mm_unpackhi_epi32(pair[4 * half + part], pair[4 * half + 2 + part]);
        }
    for (int at = 0; at < 4; at++) {
        _mm_storeu_si128((__m128i *)(target + 2 * at * target_step), _mm_unpacklo_epi64(four[at], four[4 + at]));
        _mm_storeu_si128((__m128i *)(target + (2 * at + 1) * target_step), _mm_unpackhi_epi64(four[at], four[4 + at]));
    }
}

static void turn_4_by_4(char *target, const char *source, Py_ssize_t target_step, Py_ssize_t source_step)
{
    __m128i row[4], pair[4];
    for (int at = 0; at < 4; at++)
        row[at] = _mm_loadu_si128((const __m128i *)(source + at * source_step));
    for (int at = 0; at < 2; at++) {
        pair[at] = _mm_unpacklo_epi32(row[2 * at], row[2 * at + 1]);
        pair[2 + at] = _mm_unpackhi_epi32(row[2 * at], row[2 * at + 1]);
    }
    for (int at = 0; at < 2; at++) {
        _mm_storeu_si128((__m128i *)(target + 2 * at * target_step), _mm_unpacklo_epi64(pair[2 * at], pair[2 * at + 1]));
        _mm_storeu_si128((__m128i *)(target + (2 * at + 1) * target_step),
                         _mm_unpackhi_epi64(pair[2 * at], pair[2 * at + 1]));
    }
}

/* Rows of the source become columns of the target: whole squares of 16 bytes a side in registers. */
static void turn_tile(char *target, const char *source, Py_ssize_t target_step, Py_ssize_t source_step, int num_rows,
                      int num_columns, Py_ssize_t item_bytes)
{
    const int side = item_bytes == 2 ? 8 : item_bytes == 4 ? 4 : TILE_ROWS + 1;
    const int whole_rows = num_rows / side * side, whole_columns = num_columns / side * side;
    for (int column = 0; column < whole_columns; column += side)
        for (int row = 0; row < whole_rows; row += side)
            (side == 8 ? turn_8_by_8 : turn_4_by_4)(target + column * target_step + row * item_bytes,
                                                    source + row * source_step + column * item_bytes, target_step,
                                                    source_step);
    for (int row = 0; row < num_rows; row++)
        for (int column = row < whole_rows ? whole_columns : 0; column < num_columns; column++)
            memcpy(target + column * target_step + row * item_bytes, source + row * source_step + column * item_bytes,
                   item_bytes);
}

/* Of a matrix of rows, whose target lies in columns: these are the rows that are summed up. */
static uint64_t sum_turned(const Summed *of, const char *at, char *to, const SummedDim *outer)
{
    const SummedDim *inner = of->dims + of->num_dims - 1;
    Weights of_rows;
    uint64_t total = 0;
    for (Py_ssize_t row = 0; row < outer->length; row += TILE_ROWS) {
        const int height = (int)(outer->length - row < TILE_ROWS ? outer->length - row : TILE_ROWS);
        of->way.weigh(&of_rows, outer->level, outer->first + row, height);
        for (Py_ssize_t column = 0; column < inner->length; column += TILE_COLUMNS) {
            const int width = (int)(inner->length - column < TILE_COLUMNS ? inner->length - column : TILE_COLUMNS);
            char *tile = to + column * inner->to_step + row * of->item_bytes;
            turn_tile(tile, at + row * outer->step + column * of->item_bytes, inner->to_step, outer->step, height, width,
                      of->item_bytes);
            const Rows rows = {.at = tile,
                               .step = inner->to_step,
                               .length = height,
                               .count = width,
                               .level = inner->level,
                               .first = inner->first + column};
            total += of->way.sum_rows(&rows, &of_rows);
        }
    }
    return total;
}

static uint64_t sum_box(const Summed *of, int dim, const char *at, char *to)
{
    const SummedDim *outer = of->dims + dim, *inner = of->dims + of->num_dims - 1, one = {.length = 1};
    if (outer == inner)
        return sum_matrix(of, at, to, &one);
    if (outer == inner - 1)
        return (to && inner->length > 1 && inner->to_step != of->item_bytes ? sum_turned : sum_matrix)(of, at, to, outer);
    uint64_t total = 0;
    for (Py_ssize_t index = 0; index < outer->length; index++)
        total += weight_of(outer->level, outer->first + index) *
                 sum_box(of, dim + 1, at + index * outer->step, to ? to + index * outer->to_step : NULL);
    return total;
}

/* Whether a dim of the target, where there is one, has its items side by side. */
static int is_contiguous(const SummedDim *dim, Py_ssize_t item_bytes)
{
    return dim->length <= 1 || dim->to_step == item_bytes;
}

/* Sets the distance in bytes from one index of each dim to the next; strides: in items, or None for a box in one piece.
False, with an exception, where the arguments do not fit. */
static int set_steps(Py_ssize_t *steps, PyObject *strides, PyObject *shape, Py_ssize_t item_bytes)
{
    const Py_ssize_t num_dims = PyTuple_GET_SIZE(shape);
    if (strides != Py_None && (!PyTuple_Check(strides) || PyTuple_GET_SIZE(strides) != num_dims)) {
        PyErr_SetString(PyExc_ValueError, "shape and strides have different numbers of dims");
        return 0;
    }
    Py_ssize_t step = item_bytes;
    for (Py_ssize_t dim = num_dims - 1; dim >= 0; dim--) {
        steps[dim] = strides == Py_None ? step : PyLong_AsSsize_t(PyTuple_GET_ITEM(strides, dim)) * item_bytes;
        step *= PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, dim));
    }
    return !PyErr_Occurred();
}

/* Sets the dims in the order in which the box lies in memory, and no way where such a box cannot be summed up or copied
here. False, with an exception, where the arguments do not fit. */
static int describe(Summed *summed, PyObject *shape, PyObject *strides, PyObject *to_strides, PyObject *start)
{
    const Py_ssize_t num_dims = PyTuple_GET_SIZE(shape);
    Py_ssize_t steps[MOST_DIMS], to_steps[MOST_DIMS] = {0};
    if (PyTuple_GET_SIZE(start) != num_dims) {
        PyErr_SetString(PyExc_ValueError, "shape and start have different numbers of dims");
        return 0;
    }
    if (!num_dims || num_dims > MOST_DIMS) {
        summed->way.sum_rows = NULL;
        return 1;
    }
    if (!set_steps(steps, strides, shape, summed->item_bytes) ||
        (summed->to && !set_steps(to_steps, to_strides, shape, summed->item_bytes)))
        return 0;
    for (Py_ssize_t dim = 0; dim < num_dims; dim++) {
        SummedDim described = {.length = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, dim)),
                               .step = steps[dim],
                               .to_step = to_steps[dim],
                               .level = (int)(num_dims - dim),
                               .first = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(start, dim))};
        if (PyErr_Occurred())
            return 0;
        if (described.length == 1)
            described.step = PY_SSIZE_T_MAX; /* rows do not run along it */
        Py_ssize_t place = dim;
        for (; place && summed->dims[place - 1].step < described.step; place--)
            summed->dims[place] = summed->dims[place - 1];
        summed->dims[place] = described;
    }
    summed->num_dims = (int)num_dims;
    const SummedDim *inner = summed->dims + num_dims - 1;
    if ((inner->length > 1 && inner->step != summed->item_bytes) ||
        (summed->to && !is_contiguous(inner, summed->item_bytes) &&
         (num_dims == 1 || !is_contiguous(inner - 1, summed->item_bytes))))
        summed->way.sum_rows = NULL;
    return 1;
}

/* Without the interpreter's lock. */
static void sum_up(Summed *summed)
{
    for (int dim = 0; dim < summed->num_dims; dim++)
        if (!summed->dims[dim].length)
            return;
    if (summed->way.sum_rows)
        summed->total = sum_box(summed, 0, summed->at, summed->to);
}

static PyObject *total_of(const Summed *summed)
{
    if (!summed->way.sum_rows)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(summed->total % MODULUS);
}

static PyObject *weighted_sum(PyObject *module, PyObject *arguments)
{
    unsigned long long at;
    PyObject *shape, *strides, *start;
    Summed summed = {0};
    int widest = AVX512_IFMA;
    if (!PyArg_ParseTuple(arguments, "KO!O!nO!|i:weighted_sum", &at, &PyTuple_Type, &shape, &PyTuple_Type, &strides,
                          &summed.item_bytes, &PyTuple_Type, &start, &widest))
        return NULL;
    summed.way = way_of(summed.item_bytes, widest);
    summed.at = (const char *)(uintptr_t)at;
    if (!describe(&summed, shape, strides, NULL, start))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    sum_up(&summed);
    Py_END_ALLOW_THREADS
    return total_of(&summed);
}

static int describe_copy(Summed *summed, PyObject *copy)
{
    unsigned long long to, at;
    PyObject *to_strides, *shape, *strides, *start;
    if (!PyTuple_Check(copy)) {
        PyErr_SetString(PyExc_TypeError, "a copy is a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(copy, "KOKOO!nO!:copy_and_sum", &to, &to_strides, &at, &strides, &PyTuple_Type, &shape,
                          &summed->item_bytes, &PyTuple_Type, &start))
        return 0;
    summed->way = way_of(summed->item_bytes, AVX512_IFMA);
    summed->at = (const char *)(uintptr_t)at;
    summed->to = (char *)(uintptr_t)to;
    return describe(summed, shape, strides, to_strides, start);
}

static PyObject *copy_and_sum(PyObject *module, PyObject *arguments)
{
    PyObject *copies, *totals = NULL;
    int past_cache;
    if (!PyArg_ParseTuple(arguments, "O!p:copy_and_sum", &PyList_Type, &copies, &past_cache))
        return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(copies);
    Summed *all = PyMem_Calloc(count, sizeof(Summed));
    if (!all)
        return PyErr_NoMemory();
    for (Py_ssize_t index = 0; index < count; index++) {
        all[index].past_cache = past_cache;
        if (!describe_copy(all + index, PyList_GET_ITEM(copies, index)))
            goto done; /* nothing has been copied */
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t index = 0; index < count; index++)
        sum_up(all + index);
    if (past_cache)
        _mm_sfence();
    Py_END_ALLOW_THREADS
    totals = PyList_New(count);
    for (Py_ssize_t index = 0; totals && index < count; index++) {
        PyObject *total = total_of(all + index);
        if (!total)
            Py_CLEAR(totals);
        else
            PyList_SET_ITEM(totals, index, total);
    }
done:
    PyMem_Free(all);
    return totals;
}

static PyMethodDef functions[] = {{"copy", copy, METH_VARARGS, NULL},
                                  {"weighted_sum", weighted_sum, METH_VARARGS, NULL},
                                  {"copy_and_sum", copy_and_sum, METH_VARARGS, NULL},
                                  {NULL, NULL, 0, NULL}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_boxes", .m_size = 0, .m_methods = functions};

PyMODINIT_FUNC PyInit__boxes(void)
{
    return PyModule_Create(&definition);
}
