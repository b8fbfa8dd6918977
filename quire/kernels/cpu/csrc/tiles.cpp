// Whether AMX can be used. On Linux a process must request permission for the tile registers before the first use.
#include "ops.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace quire {
bool has_tiles() {
  constexpr int kAskForPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  bool has_bf16 = d & (1u << 22), has_tile = d & (1u << 24), has_int8 = d & (1u << 25);
  return has_bf16 && has_tile && has_int8 && syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0;
}
}  // namespace quire
#else
namespace quire {
bool has_tiles() { return false; }
}  // namespace quire
#endif
