// Finds out whether this process may use AMX, Intel's matrix registers. Checks the processor and
// the operating system, and then runs a test.
#pragma once

#include <cstdint>
#include <string>

namespace dlm {

struct Kernels;

// The conditions for the use of AMX. find_amx_refusal checks them in this order.
struct AmxHost {
  uint32_t features;  // the register edx of CPUID's leaf 7
  bool has_avx512_vnni;
  // The register XCR0, which tells what registers the operating system saves for each thread.
  uint64_t saved_state;
  // Asks the operating system for permission to use AMX in all threads of the process. Returns 0
  // or errno.
  int (*request)();
  bool (*prove)();  // returns true if the kernels compute correctly
};

AmxHost read_amx_host(bool has_avx512_vnni, bool (*prove)());

// Checks the conditions in order, and stops at the first unmet condition. Returns the reason why
// AMX cannot be used, or "" if all conditions are met.
std::string find_amx_refusal(const AmxHost& host);

// Returns true if the kernels compute small INT8 and INT4 layers with the same results as plain
// C++.
bool multiplies_rightly(const Kernels& kernels);

}  // namespace dlm
