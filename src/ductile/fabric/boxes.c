/* Copies between boxes in memory, past the cache; and the sum of a box's items, each times weights of its indices. */

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

/* Weighted sums, modulo 2^64.

Rows that lie in one matrix have the same weights of columns, which are four times as many bytes as 16-bit items: four
rows share what is loaded of them. */

enum { SUMMED_AT_ONCE = 4, COLUMNS_AT_ONCE = 1 << 11 };

/* Adds to `sums` the items of each row times the weights. */
typedef void SumRows(const char *rows, Py_ssize_t step, int count, Py_ssize_t length, const uint64_t *weights,
                     uint64_t *sums);

#define SUM_ROWS(name, item, wide)                                                                                     \
    __attribute__((optimize("O3"), wide)) static void name(const char *rows, Py_ssize_t step, int count,               \
                                                           Py_ssize_t length, const uint64_t *weights, uint64_t *sums) \
    {                                                                                                                  \
        if (count < SUMMED_AT_ONCE) {                                                                                  \
            for (int row = 0; row < count; row++) {                                                                    \
                const item *items = (const item *)(rows + row * step);                                                 \
                uint64_t sum = 0;                                                                                      \
                for (Py_ssize_t at = 0; at < length; at++)                                                             \
                    sum += (uint64_t)(int64_t)items[at] * weights[at];                                                 \
                sums[row] = sum;                                                                                       \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        const item *a = (const item *)rows, *b = (const item *)(rows + step);                                          \
        const item *c = (const item *)(rows + 2 * step), *d = (const item *)(rows + 3 * step);                         \
        uint64_t of_a = 0, of_b = 0, of_c = 0, of_d = 0;                                                               \
        for (Py_ssize_t at = 0; at < length; at++) {                                                                   \
            of_a += (uint64_t)(int64_t)a[at] * weights[at];                                                            \
            of_b += (uint64_t)(int64_t)b[at] * weights[at];                                                            \
            of_c += (uint64_t)(int64_t)c[at] * weights[at];                                                            \
            of_d += (uint64_t)(int64_t)d[at] * weights[at];                                                            \
        }                                                                                                              \
        sums[0] = of_a, sums[1] = of_b, sums[2] = of_c, sums[3] = of_d;                                                \
    }

#define FOR_ALL_ITEMS(suffix, wide)                                                                                    \
    SUM_ROWS(sum_u1_##suffix, uint8_t, wide)                                                                           \
    SUM_ROWS(sum_i2_##suffix, int16_t, wide)                                                                           \
    SUM_ROWS(sum_i4_##suffix, int32_t, wide)

FOR_ALL_ITEMS(any, unused)
FOR_ALL_ITEMS(256, target("avx2"))
FOR_ALL_ITEMS(512, target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512"))

/* NULL for items of another kind. */
static SumRows *summing(const char *format)
{
    int wide = __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") ? 2
               : __builtin_cpu_supports("avx2")                                         ? 1
                                                                                        : 0;
    SumRows *of_u1[] = {sum_u1_any, sum_u1_256, sum_u1_512}, *of_i2[] = {sum_i2_any, sum_i2_256, sum_i2_512};
    SumRows *of_i4[] = {sum_i4_any, sum_i4_256, sum_i4_512};
    return !strcmp(format, "B") ? of_u1[wide] : !strcmp(format, "h") ? of_i2[wide] : !strcmp(format, "i") ? of_i4[wide] : NULL;
}

static inline __attribute__((always_inline)) uint64_t weight_of(int level, uint64_t index)
{
    uint64_t value = (index + ((uint64_t)level << 40)) * 0x9E3779B97F4A7C15u; /* the finaliser of splitmix64 */
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return (value ^ (value >> 31)) | 1;
}

/* Weights of so many indices of the last dim, which is level 1. */
typedef void Weigh(uint64_t *weights, uint64_t first, Py_ssize_t length);

#define WEIGH(name, wide)                                                                                              \
    __attribute__((optimize("O3"), wide)) static void name(uint64_t *weights, uint64_t first, Py_ssize_t length)       \
    {                                                                                                                  \
        for (Py_ssize_t at = 0; at < length; at++)                                                                     \
            weights[at] = weight_of(1, first + at);                                                                    \
    }

WEIGH(weigh_any, unused)
WEIGH(weigh_512, target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512"))

typedef struct {
    const Py_buffer *box;
    uint64_t first[PyBUF_MAX_NDIM];
    SumRows *sum_rows;
    Weigh *weigh;
} Summed;

/* Of a matrix, or of one row: so many columns at a time that their weights stay in the first cache. */
static uint64_t sum_matrix(const Summed *of, const char *at, Py_ssize_t num_rows, Py_ssize_t step, uint64_t first_row)
{
    const int last = of->box->ndim - 1;
    const Py_ssize_t length = of->box->shape[last];
    uint64_t total = 0, weights[COLUMNS_AT_ONCE], sums[SUMMED_AT_ONCE];
    for (Py_ssize_t from = 0; from < length; from += COLUMNS_AT_ONCE) {
        const Py_ssize_t width = length - from < COLUMNS_AT_ONCE ? length - from : COLUMNS_AT_ONCE;
        const char *column = at + from * of->box->itemsize;
        of->weigh(weights, of->first[last] + from, width);
        for (Py_ssize_t index = 0; index < num_rows; index += SUMMED_AT_ONCE) {
            const int count = (int)(num_rows - index < SUMMED_AT_ONCE ? num_rows - index : SUMMED_AT_ONCE);
            of->sum_rows(column + index * step, step, count, width, weights, sums);
            for (int row = 0; row < count; row++)
                total += sums[row] * (last ? weight_of(2, first_row + index + row) : 1);
        }
    }
    return total;
}

static uint64_t sum_box(const Summed *of, int dim, const char *at)
{
    const Py_buffer *box = of->box;
    if (box->ndim == 1)
        return sum_matrix(of, at, 1, 0, 0);
    if (dim == box->ndim - 2)
        return sum_matrix(of, at, box->shape[dim], box->strides[dim], of->first[dim]);
    uint64_t total = 0;
    for (Py_ssize_t index = 0; index < box->shape[dim]; index++)
        total += weight_of(box->ndim - dim, of->first[dim] + index) * sum_box(of, dim + 1, at + index * box->strides[dim]);
    return total;
}

static PyObject *weighted_sum(PyObject *module, PyObject *arguments)
{
    PyObject *from, *start, *result = NULL;
    Py_buffer box;
    Summed summed = {.box = &box};
    if (!PyArg_ParseTuple(arguments, "OO!:weighted_sum", &from, &PyTuple_Type, &start) ||
        PyObject_GetBuffer(from, &box, PyBUF_STRIDED_RO | PyBUF_FORMAT))
        return NULL;
    summed.sum_rows = summing(box.format);
    summed.weigh = __builtin_cpu_supports("avx512dq") ? weigh_512 : weigh_any;
    if (!summed.sum_rows || !box.ndim || PyTuple_GET_SIZE(start) != box.ndim ||
        (box.shape[box.ndim - 1] > 1 && box.strides[box.ndim - 1] != box.itemsize)) {
        PyErr_SetString(PyExc_ValueError, "a box is summed up whose items are uint8, int16 or int32 and lie side by side "
                                          "along its last dim, with an index where it starts in each dim");
        goto done;
    }
    for (int dim = 0; dim < box.ndim; dim++) {
        summed.first[dim] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(start, dim));
        if (PyErr_Occurred())
            goto done;
    }
    uint64_t total;
    Py_BEGIN_ALLOW_THREADS
    total = sum_box(&summed, 0, box.buf);
    Py_END_ALLOW_THREADS
    result = PyLong_FromUnsignedLongLong(total);
done:
    PyBuffer_Release(&box);
    return result;
}

static PyMethodDef functions[] = {{"copy", copy, METH_VARARGS, NULL},
                                  {"weighted_sum", weighted_sum, METH_VARARGS, NULL},
                                  {NULL, NULL, 0, NULL}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_boxes", .m_size = 0, .m_methods = functions};

PyMODINIT_FUNC PyInit__boxes(void)
{
    return PyModule_Create(&definition);
}
