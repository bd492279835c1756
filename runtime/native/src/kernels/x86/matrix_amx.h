// The functions that kernels/linear_by_matrices.h needs, for the matrix registers of AMX.
// tests/matrix_emulated.h implements the same functions in plain C++.
//
// The code uses inline assembly, because GCC's intrinsics do not tell the compiler that they read
// memory, and do not accept a template argument as a register number.
#pragma once

#include <cstdint>

namespace {
namespace matrix {

// While an object of this class exists, the matrix registers of its thread are configured for
// linear layers. At first, the registers contain arbitrary values, because other code in the
// process may use them too. Registers 0 to 3 contain sums [16, 16]. Registers 4 and 5 contain the
// codes [16, step] of rows. Registers 6 and 7 contain weights [step / 4, 16, 4].
class Registers {
 public:
  // One product of two registers covers `step` inputs of the layer. `step` must be a multiple of 4,
  // and at most 64.
  explicit Registers(int64_t step) {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    static_assert(sizeof shapes == 64);
    for (int i = 0; i < 8; ++i) shapes.rows[i] = 16, shapes.row_bytes[i] = 64;
    for (int i = 4; i < 6; ++i) shapes.row_bytes[i] = static_cast<uint16_t>(step);
    for (int i = 6; i < 8; ++i) shapes.rows[i] = static_cast<uint8_t>(step / 4);
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~Registers() { asm volatile("tilerelease"); }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;
};

template <int kRegister>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kRegister));
}

// Loads a register from memory, where the register's rows are `stride` bytes apart.
template <int kRegister>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(from), "r"(stride), "i"(kRegister)
               : "memory");
}
template <int kRegister>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
               :
               : "r"(to), "r"(stride), "i"(kRegister)
               : "memory");
}

// Multiplies signed codes by unsigned weights, and adds the products to the sums.
template <int kSums, int kCodes, int kWeights>
inline void multiply() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kCodes), "i"(kWeights));
}

}  // namespace matrix
}  // namespace
