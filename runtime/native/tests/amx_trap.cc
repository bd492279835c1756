// Emulates AMX on a processor without AMX. The processor faults at each AMX instruction. The signal
// handler then decodes the instruction as described in Intel's manual (volume 2, chapters 2.3,
// "TDPBSSD" and others), and executes it on emulated registers. Only the instructions that
// kernels/x86/matrix_amx.h uses are emulated. If the processor faults at any other instruction, the
// program ends.
#include "amx_trap.h"

#include <signal.h>
#include <ucontext.h>

#include "matrix_emulated.h"

namespace kernels_test {
namespace {

using matrix::demand;

// An instruction with a three-byte VEX prefix. It consists of the byte C4, a byte with the fields
// R, X, B and map, a byte with the fields W, vvvv, L and pp, the opcode, the ModRM byte, and an
// address.
struct Instruction {
  // `prefix` is the field pp: 0 means no prefix, 1 means 66, 2 means F3, and 3 means F2. If `mode`
  // is 3, the instruction has no address.
  int prefix, opcode, mode;
  int reg, rm, vvvv;
  uint64_t base = 0, index = 0;  // the address of row i is base + i * index
  int64_t length = 5;

  explicit Instruction(const ucontext_t& context) {
    const auto* const at = reinterpret_cast<const uint8_t*>(context.uc_mcontext.gregs[REG_RIP]);
    demand(at[0] == 0xc4 && (at[1] & 31) == 2 && (at[2] & 0x84) == 0,
           "an instruction that is not AMX's");
    const auto high = [&](int bit) { return (at[1] >> bit & 1) == 0 ? 8 : 0; };
    prefix = at[2] & 3, vvvv = ~at[2] >> 3 & 15, opcode = at[3];
    mode = at[4] >> 6, reg = (at[4] >> 3 & 7) + high(7), rm = at[4] & 7;
    if (mode == 3) return;
    int number = rm + high(5);
    if (rm == 4) {
      const int scaled = at[length++], second = (scaled >> 3 & 7) + high(6);
      demand(scaled >> 6 == 0, "an index that is multiplied");
      number = (scaled & 7) + high(5);
      if (second != 4) index = read(context, second);
    }
    demand(mode != 0 || (number & 7) != 5, "an address without a base");
    base = read(context, number);
    if (mode == 1) {
      base += static_cast<uint64_t>(int64_t{static_cast<int8_t>(at[length++])});
    } else if (mode == 2) {
      int32_t far;
      std::memcpy(&far, at + length, sizeof far);
      base += static_cast<uint64_t>(int64_t{far}), length += 4;
    }
  }

  static uint64_t read(const ucontext_t& context, int number) {
    static constexpr int kRegisters[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                         REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                         REG_R12, REG_R13, REG_R14, REG_R15};
    return static_cast<uint64_t>(context.uc_mcontext.gregs[kRegisters[number]]);
  }
};

void configure(const uint8_t* shapes) {
  uint8_t rows[16];
  uint16_t row_bytes[16];
  std::memcpy(row_bytes, shapes + 16, sizeof row_bytes),
      std::memcpy(rows, shapes + 48, sizeof rows);
  demand(shapes[0] == 1, "another palette than 1");
  for (int i = 1; i < 16; ++i) demand(shapes[i] == 0, "a first row, or reserved bytes");
  for (int i = 8; i < 16; ++i) demand(rows[i] == 0 && row_bytes[i] == 0, "more than eight");
  matrix::File::here().configure(rows, row_bytes);
}

void run(const Instruction& one) {
  enum { kNone = 0, kF3 = 2, kF2 = 3 };
  matrix::File& file = matrix::File::here();
  void* const memory = reinterpret_cast<void*>(one.base);
  const auto stride = static_cast<int64_t>(one.index);
  const auto is = [&](int prefix, int opcode, bool has_address) {
    return one.prefix == prefix && one.opcode == opcode && (one.mode != 3) == has_address;
  };
  if (is(kNone, 0x49, true)) return configure(static_cast<const uint8_t*>(memory));
  if (is(kNone, 0x49, false)) return file.release();
  if (is(kF2, 0x49, false)) return file.zero(one.reg);
  if (is(kF2, 0x4b, true)) return file.load(one.reg, memory, stride);
  if (is(kF3, 0x4b, true)) return file.store(one.reg, memory, stride);
  if (is(kF3, 0x5e, false)) return file.multiply(one.reg, one.rm, one.vvvv);
  demand(false, "an instruction that kernels/x86/matrix_amx.h does not use");
}

void handle(int, siginfo_t*, void* context) {
  auto& interrupted = *static_cast<ucontext_t*>(context);
  const Instruction one(interrupted);
  run(one);
  interrupted.uc_mcontext.gregs[REG_RIP] += one.length;
}

}  // namespace

AmxTrap::AmxTrap() {
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  demand(sigaction(SIGILL, &action, &before_) == 0, "no signal handler");
}

AmxTrap::~AmxTrap() { sigaction(SIGILL, &before_, nullptr); }

}  // namespace kernels_test
