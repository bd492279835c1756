// True if this process may use AMX's matrix registers: processor, system, and a proof.
#pragma once

#include <cstdint>
#include <string>

namespace dlm {

struct Kernels;

// What is asked, in this order.
struct AmxHost {
  uint32_t features;  // CPUID's leaf 7, edx
  bool has_avx512_vnni;
  uint64_t saved_state;  // XCR0: what the system keeps of each thread
  int (*request)();      // the registers for all threads of the process: 0, or the system's errno
  bool (*prove)();       // whether the kernels compute what they should
};

AmxHost read_amx_host(bool has_avx512_vnni, bool (*prove)());

// The first thing that stands in the way, and nothing after it is asked; empty: nothing does.
std::string find_amx_refusal(const AmxHost& host);

// True if INT8 and INT4 layers of a few numbers come out as plain C++ multiplies them.
bool multiplies_rightly(const Kernels& kernels);

}  // namespace dlm
