// What every kernel is given: its arguments as 8-byte words, and the team of threads that runs it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

union Arg {
  int64_t integer;
  double number;
  void* data;
};

// Threads that run one kernel after another. All of them call each kernel, with the same arguments.
struct Team {
  struct Shared;
  Shared* shared;
  int rank;
  int size;

  // Waits for all threads: spins for a while, then blocks. What one wrote before, all see behind it.
  void barrier() const;

  // Numbers 0, 1, 2, ... of which each is given to one thread of the team, from one barrier to the next.
  int64_t take() const;

  // Memory of this thread alone, aligned to 64 bytes, valid until it asks again. Not initialised.
  void* scratch(size_t num_bytes) const;

  // The part of [0, count) that is this thread's, in multiples of `unit`. Inlined, or builds would share it.
  __attribute__((always_inline)) void share(int64_t count, int64_t unit, int64_t* begin, int64_t* end) const {
    int64_t units = (count + unit - 1) / unit;
    *begin = units * rank / size * unit;
    *end = units * (rank + 1) / size * unit;
    if (*begin > count) *begin = count;
    if (*end > count) *end = count;
  }
};

using Kernel = void (*)(const Arg*, const Team&);

struct Call {
  Kernel kernel;
  Arg args[32];
};

// Runs calls one after another with a team of `num_threads`, which is forked once.
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
