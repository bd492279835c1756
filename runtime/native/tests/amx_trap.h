// Emulates AMX's instructions on processors without AMX.
#pragma once

#include <signal.h>

namespace kernels_test {

// While an AmxTrap exists, a handler of SIGILL emulates the AMX instructions that
// kernels/x86/matrix_amx.h uses.
class AmxTrap {
 public:
  AmxTrap();
  ~AmxTrap();
  AmxTrap(const AmxTrap&) = delete;
  AmxTrap& operator=(const AmxTrap&) = delete;

 private:
  struct sigaction before_;
};

}  // namespace kernels_test
