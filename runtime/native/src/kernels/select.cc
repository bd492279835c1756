#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>

#include "base/error.h"
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include "kernels/x86/amx.h"
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace dlm {

bool CachedAttention::is_in_table() const {
  const int64_t end = has_drafts                    ? 3 * table_rows
                      : visible_block == table_rows ? INT32_MAX - 1
                                                    : table_rows;
  return std::all_of(positions, positions + batch * tokens,
                     [&](int64_t at) { return at >= 0 && at < end; });
}

bool CachedAttention::has_good_segments() const {
  if (segment_count == 0) return true;
  int64_t next = 0;
  for (const Segment* it = segments; it != segments + segment_count; ++it) {
    if (it->start < 0 || it->cached < 0 || it->cached > cached || it->start > cached - it->cached)
      return false;
    // Segments with the same tokens belong to the same request, so only the first segment of these
    // starts a part.
    if (it != segments && it->first == it[-1].first && it->tokens == it[-1].tokens) continue;
    if (it->first != next || it->tokens < 1 || it->tokens > tokens - next) return false;
    next += it->tokens;
  }
  return batch == 1 && next == tokens;
}

bool Embedding::is_in_range() const {
  return std::all_of(ids, ids + tokens, [&](int64_t id) { return id >= 0 && id < rows; });
}

bool Experts::is_in_range() const {
  return std::all_of(chosen, chosen + rows * active,
                     [&](int64_t expert) { return expert >= 0 && expert < count; });
}

extern const Kernels kAvx512Kernels, kAvxVnniKernels, kAvx2Kernels, kNeonKernels;
extern decltype(Kernels::linear) const kAmxLinear;

namespace {

// Describes a kernel set. `all` names the instruction sets that the kernels need. If the processor
// lacks one of them, the description contains a refusal.
KernelSet make_set(const Kernels& kernels, bool has_all, const char* all) {
  return {kernels.name, &kernels, has_all ? "" : std::string("the processor has no ") + all};
}

std::vector<KernelSet> find_kernel_sets() {
#if defined(__x86_64__)
  std::vector<KernelSet> sets;
  [[maybe_unused]] constexpr char kNotCompiled[] =
      "this library's compiler did not know the instructions";
  const auto has = [](auto... features) { return (features && ...); };
  const bool has_avx512_vnni =
      has(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"),
          __builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512vl"),
          __builtin_cpu_supports("avx512vnni"));
  // CPUID reports F16C in leaf 1, and AVX-VNNI in leaf 7, subleaf 1. The code reads CPUID itself,
  // because older compilers cannot test for these features by name.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1) != 0;
  const bool has_avx2 =
      has(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("fma"), has_f16c);
#ifdef DLM_AMX
  // This kernel set is not created in the source file of the AMX kernels. That file is compiled for
  // AMX, so the processor may be unable to run its code.
  static const Kernels amx = [] {
    Kernels kernels = kAvx512Kernels;
    kernels.name = "amx-int8", kernels.linear = kAmxLinear;
    return kernels;
  }();
  const AmxHost host = read_amx_host(has_avx512_vnni, [] { return multiplies_rightly(amx); });
  sets.push_back({amx.name, &amx, find_amx_refusal(host)});
#else
  sets.push_back({"amx-int8", nullptr, kNotCompiled});
#endif
  sets.push_back(make_set(kAvx512Kernels, has_avx512_vnni, "AVX-512 with VNNI"));
#ifdef DLM_AVX_VNNI
  const bool has_avx_vnni =
      has_avx2 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
  sets.push_back(make_set(kAvxVnniKernels, has_avx_vnni, "AVX-VNNI"));
#else
  sets.push_back({"avx-vnni", nullptr, kNotCompiled});
#endif
  sets.push_back(make_set(kAvx2Kernels, has_avx2, "AVX2 with FMA and F16C"));
  return sets;
#elif defined(__aarch64__)
  return {make_set(kNeonKernels, (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0, "dot products")};
#else
  return {};
#endif
}

}  // namespace

const std::vector<KernelSet>& list_kernel_sets() {
  static const std::vector<KernelSet> sets = find_kernel_sets();
  return sets;
}

std::vector<const Kernels*> list_kernels() {
  std::vector<const Kernels*> found;
  for (const KernelSet& set : list_kernel_sets())
    if (set.refusal.empty()) found.push_back(set.kernels);
  return found;
}

const Kernels* find_kernels() {
  const std::vector<const Kernels*> known = list_kernels();
  const char* const wanted = std::getenv("DLM_KERNELS");
  if (wanted == nullptr || *wanted == '\0') return known.empty() ? nullptr : known.front();
  if (std::string(wanted) == "none") return nullptr;
  std::string why = "this processor does not have", choices;
  for (const KernelSet& set : list_kernel_sets()) {
    const bool is_wanted = set.name == std::string(wanted);
    if (is_wanted && set.refusal.empty()) return set.kernels;
    if (is_wanted) why = "do not run here: " + set.refusal;
    if (set.refusal.empty()) choices += std::string(set.name) + ", ";
  }
  fail(DLM_INVALID_ARGUMENT, "DLM_KERNELS is \"%.40s\", kernels that %s; choose one of %snone",
       wanted, why.c_str(), choices.c_str());
}

}  // namespace dlm

extern "C" DLM_API const dlm_kernel_set* dlm_kernel_set_at(size_t index) try {
  static const std::vector<dlm_kernel_set> told = [] {
    std::vector<dlm_kernel_set> sets;
    for (const dlm::KernelSet& set : dlm::list_kernel_sets())
      sets.push_back({set.name, set.refusal.empty() ? nullptr : set.refusal.c_str()});
    return sets;
  }();
  return index < told.size() ? &told[index] : nullptr;
} catch (const std::bad_alloc&) {
  return nullptr;
}
