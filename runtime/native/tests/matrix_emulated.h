// Emulates the matrix registers of kernels/x86/matrix_amx.h in plain C++, following Intel's
// description of the instructions. The program ends if a real processor would fault, or if a kernel
// reads a part of a register that the kernel has not set.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {
namespace matrix {

inline void demand(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "matrix registers: %s\n", what);
  std::abort();
}

struct Register {
  int64_t rows, row_bytes;
  uint8_t bytes[16][64];
};

// The registers of one thread.
class File {
 public:
  static File& here() {
    static thread_local File file{};
    return file;
  }

  // Sets the shapes of the eight registers.
  void configure(const uint8_t* rows, const uint16_t* row_bytes) {
    demand(!is_configured_, "configured twice");
    for (int i = 0; i < 8; ++i) {
      demand(rows[i] > 0 && rows[i] <= 16 && row_bytes[i] > 0 && row_bytes[i] <= 64,
             "a shape that no register has");
      registers_[i] = {rows[i], row_bytes[i], {}};
    }
    is_configured_ = true;
  }
  void release() { is_configured_ = false; }

  void zero(int number) { std::memset(find(number).bytes, 0, sizeof(Register::bytes)); }

  // load() sets the register to zero outside of its shape. store() writes only the part inside the
  // shape.
  void load(int number, const void* from, int64_t stride) {
    zero(number);
    Register& to = find(number);
    for (int64_t row = 0; row < to.rows; ++row)
      std::memcpy(to.bytes[row], static_cast<const uint8_t*>(from) + row * stride,
                  static_cast<size_t>(to.row_bytes));
  }
  void store(int number, void* to, int64_t stride) {
    const Register& from = find(number);
    for (int64_t row = 0; row < from.rows; ++row)
      std::memcpy(static_cast<uint8_t*>(to) + row * stride, from.bytes[row],
                  static_cast<size_t>(from.row_bytes));
  }

  void multiply(int to, int signed_bytes, int unsigned_bytes) {
    Register& sums = find(to);
    const Register &codes = find(signed_bytes), &weights = find(unsigned_bytes);
    demand(to != signed_bytes && to != unsigned_bytes && signed_bytes != unsigned_bytes,
           "one register twice");
    demand(sums.rows == codes.rows && sums.row_bytes == weights.row_bytes &&
               codes.row_bytes == 4 * weights.rows,
           "shapes that do not fit each other");
    for (int64_t row = 0; row < sums.rows; ++row) {
      uint32_t totals[16];  // sums wrap around, as on the processor
      std::memcpy(totals, sums.bytes[row], sizeof totals);
      for (int64_t line = 0; line < weights.rows; ++line)
        for (int64_t column = 0; column < sums.row_bytes / 4; ++column) {
          int32_t four = 0;
          for (int64_t i = 0; i < 4; ++i)
            four += static_cast<int8_t>(codes.bytes[row][4 * line + i]) *
                    weights.bytes[line][4 * column + i];
          totals[column] += static_cast<uint32_t>(four);
        }
      std::memcpy(sums.bytes[row], totals, sizeof totals);
    }
  }

 private:
  Register& find(int number) {
    demand(is_configured_, "used by a thread that has not configured them");
    demand(number < 8, "one that does not exist");
    return registers_[number];
  }

  bool is_configured_;
  Register registers_[8];
};

class Registers {
 public:
  explicit Registers(int64_t step) {
    const auto bytes = static_cast<uint16_t>(step);
    const auto rows = static_cast<uint8_t>(step / 4);
    const uint8_t high[] = {16, 16, 16, 16, 16, 16, rows, rows};
    const uint16_t wide[] = {64, 64, 64, 64, bytes, bytes, 64, 64};
    File::here().configure(high, wide);
  }
  ~Registers() { File::here().release(); }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;
};

template <int kRegister>
void zero() {
  File::here().zero(kRegister);
}
template <int kRegister>
void load(const void* from, int64_t stride) {
  File::here().load(kRegister, from, stride);
}
template <int kRegister>
void store(void* to, int64_t stride) {
  File::here().store(kRegister, to, stride);
}
template <int kSums, int kCodes, int kWeights>
void multiply() {
  File::here().multiply(kSums, kCodes, kWeights);
}

}  // namespace matrix
}  // namespace
