#include "kernels/x86/amx.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/kernels.h"

namespace dlm {
namespace {

// bits of the register edx in CPUID's leaf 7
constexpr uint32_t kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
constexpr uint64_t kTileConfig = 1u << 17, kTileData = 1u << 18;  // bits of the register XCR0

// These constants are from asm/prctl.h of Linux 5.16. Older versions of this header do not define
// them.
constexpr int kRequestPermission = 0x1023, kTileDataFeature = 18;

int request_registers() {
  return syscall(SYS_arch_prctl, kRequestPermission, kTileDataFeature) == 0 ? 0 : errno;
}

uint64_t read_saved_state() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & bit_OSXSAVE) == 0) return 0;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return static_cast<uint64_t>(edx) << 32 | eax;
}

class InOrder final : public Parallel {
  void run(size_t count, void (*task)(void*, size_t), void* user) override {
    for (size_t i = 0; i < count; ++i) task(user, i);
  }
};

// Tests whether the kernels multiply correctly on this processor, with pseudo-random rows and
// weights. Each row contains the number 127, so the scale of each row is 1. The weights' scales are
// also 1. So each result must equal the integer sum of the products.
bool multiplies_rightly(const Kernels& kernels, int64_t group_size) {
  constexpr int64_t kRows = 33, kInputs = 72, kColumns = 33, kWidth = padded_columns(kColumns);
  const int64_t parts = group_size == 0 ? 1 : 2, offset = group_size == 0 ? 128 : 8;
  uint32_t state = 1;
  const auto draw = [&] {
    return (state = state * 1664525u + 1013904223u) >> 24;
  };  // returns the next pseudo-random byte (generator of "Numerical Recipes")
  std::vector<float> x(kRows * kInputs), y(kRows * kColumns);
  for (int64_t i = 0; i < kRows * kInputs; ++i)
    x[i] = i % kInputs == i / kInputs ? 127.0f : static_cast<float>(draw() % 255) - 127.0f;
  std::vector<uint8_t> panels(kWidth * kInputs / parts);
  for (uint8_t& code : panels) code = static_cast<uint8_t>(draw());
  const std::vector<float> ones(kWidth, 1.0f);
  const std::vector<uint16_t> halves(kWidth * kInputs, 0x3c00);  // the number 1 in fp16
  const void* const scales =
      group_size == 0 ? static_cast<const void*>(ones.data()) : halves.data();
  const LinearWeight weight{panels.data(), scales, kColumns};
  float* const output = y.data();
  const Linear layer{x.data(),  kRows, kInputs, &weight, &output, 1, dlm::Activation::none,
                     group_size};
  std::vector<std::max_align_t> scratch(layer.scratch_bytes() / sizeof(std::max_align_t) + 64);
  void* aligned = scratch.data();
  size_t space = scratch.size() * sizeof(std::max_align_t);
  InOrder in_order;
  kernels.linear(layer, std::align(64, layer.scratch_bytes(), aligned, space), in_order);
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t column = 0; column < kColumns; ++column) {
      int64_t sum = 0;
      for (int64_t k = 0; k < kInputs; ++k) {
        const int64_t together = kDot * parts,
                      line = column / kPanel * (kInputs / together) + k / together;
        const int byte = panels[(line * kPanel + column % kPanel) * kDot + k % kDot];
        const int code = parts == 1 ? byte : k % kPairs < kDot ? byte & 15 : byte >> 4;
        sum += static_cast<int64_t>(x[row * kInputs + k]) * (code - offset);
      }
      if (y[row * kColumns + column] != static_cast<float>(sum)) return false;
    }
  return true;
}

}  // namespace

AmxHost read_amx_host(bool has_avx512_vnni, bool (*prove)()) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) edx = 0;
  return {edx, has_avx512_vnni, read_saved_state(), request_registers, prove};
}

std::string find_amx_refusal(const AmxHost& host) {
  if ((host.features & kAmxTile) == 0) return "the processor has no amx-tile";
  if ((host.features & kAmxInt8) == 0) return "the processor has no amx-int8";
  if (!host.has_avx512_vnni) return "the processor has no AVX-512 with VNNI";
  if ((host.saved_state & kTileConfig) == 0 || (host.saved_state & kTileData) == 0)
    return "the system does not keep AMX's registers (bits 17 and 18 of XCR0)";
  if (const int error = host.request(); error != 0)
    return std::string("the system does not grant AMX's registers: ") + std::strerror(error);
  if (!host.prove()) return "a test of AMX multiplication gave wrong results";
  return "";
}

bool multiplies_rightly(const Kernels& kernels) {
  return multiplies_rightly(kernels, 0) && multiplies_rightly(kernels, 32);
}

}  // namespace dlm
