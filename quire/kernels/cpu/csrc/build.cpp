// The table of kernels for one instruction set.
#include "ops.h"
#include "team.h"

#define STRING(x) #x
#define NAME_OF(x) STRING(x)

namespace quire::ISA {

#define OP(name, kinds) \
  void name(const Arg*, const Team&); \
  static_assert(sizeof(kinds) - 1 <= MAX_ARGS, "a call of " #name " has no room for its arguments");
QUIRE_OPS
#undef OP

static const Op kOps[] = {
#define OP(name, kinds) {#name, kinds, name},
    QUIRE_OPS
#undef OP
};

static bool runs_here() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(__AVX512BF16__)
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return false;
#endif
#if defined(__AVX512F__)
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return false;
#endif
#if defined(__AVX2__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
#endif
#if defined(__AMX_TILE__)
  return has_tiles();
#endif
#endif
  return true;
}

extern const Build kBuild;
const Build kBuild = {NAME_OF(ISA), kOps, sizeof kOps / sizeof kOps[0], runs_here};

}  // namespace quire::ISA
