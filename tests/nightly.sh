#!/usr/bin/env bash
# nightly.sh PART:LIMIT ...: runs `make PART` for each, and ends it when its time is over, as Ctrl-C does, so that nothing
# that it started is left. Then prints the time and the result of each; exit code 1 when one of them failed.
set -uo pipefail
table="" failed=0
trap 'kill -INT $child; wait $child; exit 130' INT TERM
for each in "$@"; do
    part=${each%%:*} limit=${each##*:} began_s=$SECONDS
    printf '\n== %s, at most %s\n' "$part" "$limit"
    env --default-signal=INT timeout --signal=INT --kill-after=2m "$limit" "${MAKE:-make}" "$part" &
    child=$!
    wait $child
    code=$?
    case $code in
    0) result=ok ;;
    124 | 137) result="failed: not done within $limit" failed=1 ;;
    *) result="failed: exit code $code" failed=1 ;;
    esac
    table+=$(printf '%-16s %6d s  %s' "$part" $((SECONDS - began_s)) "$result")$'\n'
done
printf '\n%s%-16s %6d s\n' "$table" "all of them" "$SECONDS"
exit $failed
