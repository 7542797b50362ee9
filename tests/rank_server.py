"""`python -m tests.rank_server CODE`: what multiprocessing executes as its forkserver, in a process that began warm."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
