// AMX's matrix registers, with the interface that kernels/linear_by_matrices.h needs.
// tests/matrix_emulated.h has the same in plain C++.
//
// Instructions are written as assembly: GCC's intrinsics do not declare that they read memory, and
// do not accept a template's constant.
#pragma once

#include <cstdint>

namespace {
namespace matrix {

// Configures this thread's registers while it lives. Other code uses them before and after, so
// their contents are unknown. 0 to 3: sums [16, 16]. 4 and 5: codes [16, step] of rows. 6 and 7:
// weights [step / 4, 16, 4].
class Registers {
 public:
  // `step`: inputs per product, a multiple of 4, at most 64.
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

// Rows are `stride` bytes apart.
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

// Adds the products of signed codes and unsigned weights to sums.
template <int kSums, int kCodes, int kWeights>
inline void multiply() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kCodes), "i"(kWeights));
}

}  // namespace matrix
}  // namespace
