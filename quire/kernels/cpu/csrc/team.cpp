#include "team.h"

#include <omp.h>

#include <cstdlib>
#include <cstring>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace quire {

constexpr int kSpins = 4000;  // about 50 us: longer than threads of a kernel differ, far shorter than a time slice

struct Team::Shared {
  alignas(64) int arrived = 0;
  alignas(64) uint32_t round = 0;
  alignas(64) int sleeping = 0;
  alignas(64) int64_t next = 0;
};

static void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void sleep_while(uint32_t* word, uint32_t value) {
#ifdef __linux__
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  (void)word, (void)value;
  sched_yield();
#endif
}

static void wake_all(uint32_t* word) {
#ifdef __linux__
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

void Team::barrier() const {
  if (size == 1) {
    shared->next = 0;
    return;
  }
  Shared& s = *shared;
  uint32_t round = __atomic_load_n(&s.round, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&s.arrived, 1, __ATOMIC_ACQ_REL) == size) {
    s.arrived = 0;
    s.next = 0;
    __atomic_store_n(&s.round, round + 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&s.sleeping, __ATOMIC_SEQ_CST)) wake_all(&s.round);
    return;
  }
  for (int spin = 0; spin < kSpins; spin++) {
    if (__atomic_load_n(&s.round, __ATOMIC_ACQUIRE) != round) return;
    relax();
  }
  __atomic_add_fetch(&s.sleeping, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&s.round, __ATOMIC_SEQ_CST) == round) sleep_while(&s.round, round);
  __atomic_sub_fetch(&s.sleeping, 1, __ATOMIC_SEQ_CST);
}

int64_t Team::take() const { return __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED); }

namespace {
struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { free(data); }
};
}  // namespace

void* Team::scratch(size_t num_bytes) const {
  thread_local Buffer buffer;
  if (buffer.size < num_bytes) {
    free(buffer.data);
    size_t size = (num_bytes + 4095) / 4096 * 4096;
    buffer.data = aligned_alloc(64, size);
    if (buffer.data == nullptr) abort();  // at most some megabytes, so there is no way to continue
    buffer.size = size;
  }
#ifdef __SANITIZE_ADDRESS__  // what is left of a larger buffer must not be used
  ASAN_UNPOISON_MEMORY_REGION(buffer.data, num_bytes);
  ASAN_POISON_MEMORY_REGION((char*)buffer.data + num_bytes, buffer.size - num_bytes);
#endif
  return buffer.data;
}

static void work(const Call* calls, size_t num_calls, const Team& team) {
  for (size_t i = 0; i < num_calls; i++) {
    calls[i].kernel(calls[i].args, team);
    team.barrier();
  }
}

void run(const Call* calls, size_t num_calls, int num_threads) {
  Team::Shared shared;
  if (num_threads <= 1) {
    work(calls, num_calls, Team{&shared, 0, 1});
    return;
  }
#pragma omp parallel num_threads(num_threads)
  work(calls, num_calls, Team{&shared, omp_get_thread_num(), omp_get_num_threads()});
}

}  // namespace quire
