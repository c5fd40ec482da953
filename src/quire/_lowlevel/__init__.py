"""Raw memory, memory reuse and fork handling: everything that bypasses the memory management of Python.

No other package uses addresses, `ctypes`, `madvise`, `memfd_create` or `os.register_at_fork`. Each technique below says
why it is correct, what can go wrong, and what replaces it. The environment variable `QUIRE_SAFE=1` selects the
replacements; so do systems that lack what a technique needs. Results are the same; more is copied.

**Memory reuse** (`pool`). The first write to each page of fresh memory is a page fault, which costs more than filling
the page. `MemoryPool` keeps the memory of arrays that were freed. It is correct because numpy and torch themselves
keep an array alive for as long as a view, a tensor or a DLPack capsule refers to it: a finalizer of the array, which
runs after the last reference is gone, gives its memory back. Nothing counts references. An address that a C extension
keeps without a reference reads later data, as it would after `free`. Replacement: a new array each time.

**Shared memory that is reused** (`shared`). A worker of a DataLoader fills an anonymous file (`memfd_create`) that the
trainer maps through `/proc/<pid>/fd`. One byte of the file says which of the two owns it. The worker sets it before the
tensor is sent, and the trainer's finalizer clears it, so each side writes only what it owns. A process forked by the
trainer sees the same memory; memory that is in use at a fork is therefore never given back. A worker that ends before
the trainer has opened its file loses the batch, which raises an error. Replacement: torch's own shared memory.

**Rows by address** (`addresses.RawMemory`). numpy gathers rows of one array; the array here is the address space of the
process, so that rows of many mapped files need one call. It is correct as long as every address is inside of mapped
memory: `AddressTable` checks offsets against the sizes of buffers when a file is opened, and keeps their owners alive.
A fault in those checks would crash the process or copy other memory. Replacement: `CheckedMemory` finds the buffer of
each row, checks the bounds, and copies row by row.

**Mappings without descriptors** (`addresses.map_file`, `addresses.SharedMemory`). Python's `mmap` keeps a descriptor
open for each mapping, and a dataset may have thousands of files. libc's `mmap` does not. The mapping is removed when
the Arrow buffer or the array on it is freed. A file that is truncated while it is mapped ends the process with SIGBUS,
as with every mapping. `SharedMemory.move_to` replaces anonymous memory by a file at the same address (`MAP_FIXED`),
which is safe because it replaces exactly the range that the object itself has mapped. Replacement: Python's `mmap`;
`move_to` then copies the content once, and later changes are not shared.

**Advice to the system** (`addresses.read_ahead`, `advise_random`, `drop_mapped_pages`). `madvise` and `mincore` on
ranges of mapped files. They change how fast pages come and go, never their content: all of these mappings are shared
with their file, for which `MADV_DONTNEED` drops only this process's view. Replacement: no advice.

**Free memory** (`allocator.return_free_memory`). glibc keeps memory that was freed, in each of its arenas.
`malloc_trim` returns whole free pages to the system, and does not move or change anything in use. Replacement: the
memory stays with the process.

**Forks** (`forks`). `fork` copies one thread and all memory, including locks that other threads hold. `ForkSafeLock`
replaces such locks in the child; `no_fork` lets forks wait; `at_fork` registers the hooks of quire. A lock is replaced
only if the forking thread does not hold it, and only in the child, where no other thread exists yet. The state that it
guards has to be valid after each single change. `QUIRE_SAFE` does not turn this off; systems without `fork` need none.

**Garbage collection** (`collector`). A generator that the garbage collector closes must not wait for threads. Python
does not say who closes a generator. But a collection that is started during a collection does nothing, which a cyclic
object shows: if it survives, one is running. `QUIRE_SAFE` does not change this; it uses documented functions only.
"""

from __future__ import annotations

import os
from functools import cache


@cache
def is_safe() -> bool:
    """Whether `QUIRE_SAFE` selects the plain replacements of all techniques in this package."""
    return os.environ.get("QUIRE_SAFE", "0") not in ("", "0")
