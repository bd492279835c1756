// AMX's instructions for a processor that has none.
#pragma once

#include <signal.h>

namespace kernels_test {

// While it lives, those that kernels/x86/matrix_amx.h uses are run by a handler of SIGILL.
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
