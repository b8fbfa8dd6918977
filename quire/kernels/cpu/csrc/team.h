// Arguments of every kernel: 8-byte words, and the team of threads that runs it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

union Arg {
  int64_t integer;
  double number;
  void* data;
};

// Threads that run one kernel after another. Every thread calls each kernel with the same arguments.
struct Team {
  struct Shared;
  Shared* shared;
  int rank;
  int size;

  // Waits for all threads: spins for a while, then blocks. Writes before it are visible to all threads after it.
  void barrier() const;

  // Returns 0, 1, 2, ...: each number to one thread of the team only. A barrier resets the counter.
  int64_t take() const;

  // Uninitialised memory of this thread, aligned to 64 bytes, valid until its next call.
  void* scratch(size_t num_bytes) const;

  // The part of [0, count) of this thread, in multiples of `unit`. Inlined, or all builds would share one build's code.
  __attribute__((always_inline)) void share(int64_t count, int64_t unit, int64_t* begin, int64_t* end) const {
    int64_t units = (count + unit - 1) / unit;
    *begin = units * rank / size * unit;
    *end = units * (rank + 1) / size * unit;
    if (*begin > count) *begin = count;
    if (*end > count) *end = count;
  }
};

using Kernel = void (*)(const Arg*, const Team&);

constexpr int MAX_ARGS = 40;
struct Call {
  Kernel kernel;
  Arg args[MAX_ARGS];
};

// Runs calls one after another with a team of `num_threads`, which is started once.
void run(const Call* calls, size_t num_calls, int num_threads);

struct Op {
  const char* name;
  const char* kinds;  // one letter per argument: t tensor, o tensor or None, i integer, d number
  Kernel kernel;
};

struct Build {
  const char* name;
  const Op* ops;
  int num_ops;
  bool (*runs_here)();
};

}  // namespace quire
