// Finds out whether this process may use AMX. It checks the processor and the operating system, and
// runs a test.
#pragma once

#include <cstdint>
#include <string>

namespace dlm {

struct Kernels;

// What must be checked before AMX is used, in this order.
struct AmxHost {
  uint32_t features;  // edx of CPUID's leaf 7
  bool has_avx512_vnni;
  uint64_t saved_state;  // XCR0: the registers that the system saves for each thread
  int (*request)();  // requests the registers for all threads of the process; returns 0 or errno
  bool (*prove)();   // returns whether the kernels compute correctly
};

AmxHost read_amx_host(bool has_avx512_vnni, bool (*prove)());

// Returns a text about the first check that failed, or "" if all checks pass. The checks after a
// failed one are not made.
std::string find_amx_refusal(const AmxHost& host);

// True if the kernels compute small INT8 and INT4 layers with the same results as plain C++.
bool multiplies_rightly(const Kernels& kernels);

}  // namespace dlm
