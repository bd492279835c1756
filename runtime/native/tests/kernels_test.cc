// Compares every kernel set that this processor supports with plain loops. For INT8 and INT4
// layers, the results must be bit-identical. Sums of floats must be equal within a tolerance. If
// the processor does not support a kernel set, the program tests this set only if it can emulate
// the missing instructions.
//
// With the argument `all`, INT8 and INT4 layers are tested with every number of rows and columns.
//
// Prints one line for each set, and "N passed, N failed". The exit status is 1 if a check failed.
#include "kernels_test.h"

#ifdef __x86_64__
#include "amx_trap.h"

namespace dlm {
extern const Kernels kAvxVnniStandIn, kAmxEmulated, kAmxStandIn;
}
#endif

int main(int argc, char** argv) {
  kernels_test::Tally tally;
  tally.all = argc > 1 && std::string(argv[1]) == "all";
  std::vector<const dlm::Kernels*> all = dlm::list_kernels();
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    all.push_back(&dlm::kAvxVnniStandIn);
#endif
  test_positions_outside_the_tables_are_seen(tally);
  test_segments_that_lie_are_seen(tally);
  for (const dlm::Kernels* const kernels : all) {
    std::printf("%s\n", kernels->name);
    test_linear(tally, *kernels);
    test_nvfp4_linear(tally, *kernels);
    test_tied_head(tally, *kernels);
    test_attention(tally, *kernels);
    test_add_norm(tally, *kernels);
    test_candidates(tally, *kernels);
    test_low_rank_updates(tally, *kernels);
  }
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    std::vector<const dlm::Kernels*> amx = {&dlm::kAmxEmulated};
#ifdef DLM_AMX
    const kernels_test::AmxTrap trap;  // does nothing if the processor has AMX
    amx.push_back(&dlm::kAmxStandIn);
#endif
    for (const dlm::Kernels* const kernels : amx) {
      std::printf("%s\n", kernels->name);
      test_linear(tally, *kernels);  // these kernel sets have only linear layers
    }
    test_amx(tally, dlm::kAmxEmulated);
  }
#endif
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed == 0 ? 0 : 1;
}
