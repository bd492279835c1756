// True if this process may use AMX: checks the processor and the system, and runs a test.
#pragma once

#include <cstdint>
#include <string>

namespace dlm {

struct Kernels;

// The checks, in this order.
struct AmxHost {
  uint32_t features;  // CPUID's leaf 7, edx
  bool has_avx512_vnni;
  uint64_t saved_state;  // XCR0: the state that the system saves per thread
  int (*request)();      // requests the registers for all threads of the process: 0, or errno
  bool (*prove)();       // whether the kernels compute correctly
};

AmxHost read_amx_host(bool has_avx512_vnni, bool (*prove)());

// The first failed check (later ones are not run), or "" if all pass.
std::string find_amx_refusal(const AmxHost& host);

// True if small INT8 and INT4 layers give the same results as plain C++.
bool multiplies_rightly(const Kernels& kernels);

}  // namespace dlm
