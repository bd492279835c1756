#include "kernels.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace dlm {

bool CachedAttention::is_in_table() const {
  return std::all_of(positions, positions + batch * tokens, [&](int64_t at) { return at >= 0 && at < table_rows; });
}

extern const Kernels kAvx512Kernels, kAvxVnniKernels, kAvx2Kernels, kNeonKernels;

std::vector<const Kernels*> list_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  const auto has = [](auto... features) { return (features && ...); };
  if (has(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"), __builtin_cpu_supports("avx512dq"),
          __builtin_cpu_supports("avx512vl"), __builtin_cpu_supports("avx512vnni")))
    found.push_back(&kAvx512Kernels);
  if (has(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("fma"), __builtin_cpu_supports("f16c"))) {
#ifdef DLM_AVX_VNNI
    // Leaf 7, subleaf 1: older compilers do not know the feature by name.
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0) found.push_back(&kAvxVnniKernels);
#endif
    found.push_back(&kAvx2Kernels);
  }
#elif defined(__aarch64__)
  if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) found.push_back(&kNeonKernels);
#endif
  return found;
}

const Kernels* find_kernels() {
  const std::vector<const Kernels*> known = list_kernels();
  const char* const wanted = std::getenv("DLM_KERNELS");
  if (wanted == nullptr || *wanted == '\0') return known.empty() ? nullptr : known.front();
  if (std::string(wanted) == "none") return nullptr;
  std::string choices;
  for (const Kernels* const kernels : known) {
    if (wanted == std::string(kernels->name)) return kernels;
    choices += std::string(kernels->name) + ", ";
  }
  fail(DLM_INVALID_ARGUMENT, "DLM_KERNELS is \"%.40s\", kernels that this processor does not have; choose one of %snone",
       wanted, choices.c_str());
}

}  // namespace dlm
