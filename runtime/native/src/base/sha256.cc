// Computes SHA-256 (FIPS 180-4, sections 4.1.2, 5.1.1, 6.2). This file contains a version in
// portable code, and a version that uses the SHA instructions of x86-64 or ARMv8.
#include "base/sha256.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/descriptor.h"
#include "base/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace dlm {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes (section
// 4.2.2).
alignas(16) constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The first 32 bits of the fractional parts of the square roots of the first 8 primes (section
// 5.3.3).
constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

constexpr uint32_t rotate(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

void compress_portable(uint32_t* state, const uint8_t* blocks, size_t count) {
  for (; count > 0; --count, blocks += 64) {
    uint32_t w[64];
    for (int t = 0; t < 16; ++t) {
      const uint8_t* b = blocks + 4 * t;
      w[t] = uint32_t{b[0]} << 24 | uint32_t{b[1]} << 16 | uint32_t{b[2]} << 8 | uint32_t{b[3]};
    }
    for (int t = 16; t < 64; ++t) {
      const uint32_t s0 = rotate(w[t - 15], 7) ^ rotate(w[t - 15], 18) ^ w[t - 15] >> 3;
      const uint32_t s1 = rotate(w[t - 2], 17) ^ rotate(w[t - 2], 19) ^ w[t - 2] >> 10;
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int t = 0; t < 64; ++t) {
      const uint32_t sum1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
      const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRounds[t] + w[t];
      const uint32_t t2 =
          (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

#if defined(__x86_64__)
// This function uses cpuid, because __builtin_cpu_supports("sha") does not compile with every
// compiler.
bool has_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return false;
  const bool has_ssse3 = (c >> 9 & 1) != 0, has_sse41 = (c >> 19 & 1) != 0;
  return has_ssse3 && has_sse41 && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 &&
         (b >> 29 & 1) != 0;
}

// The instruction sha256rnds2 computes two rounds. It needs the eight words A to H of the hash
// state in two registers: (A, B, E, F) and (C, D, G, H), with the high word first. The instructions
// sha256msg1 and sha256msg2 compute four words of the message schedule (Intel SDM, volume 2).
__attribute__((target("sha,ssse3,sse4.1"))) void compress_special(uint32_t* state,
                                                                  const uint8_t* blocks,
                                                                  size_t count) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xB1), efgh = _mm_shuffle_epi32(hgfe, 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
  for (; count > 0; --count, blocks += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
      __m128i& now = w[group & 3];
      if (group < 4) {
        now = _mm_shuffle_epi8(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks + 16 * group)), big_endian);
      } else {
        // w12, w8 and w4 are the groups of four words that start 12, 8 and 4 words before the new
        // group. `now` will become the new group, but still contains the group that starts 16 words
        // before it.
        const __m128i &w12 = w[(group + 1) & 3], &w8 = w[(group + 2) & 3], &w4 = w[(group + 3) & 3];
        now = _mm_sha256msg2_epu32(
            _mm_add_epi32(_mm_sha256msg1_epu32(now, w12), _mm_alignr_epi8(w4, w8, 4)), w4);
      }
      const __m128i sum =
          _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRounds + 4 * group)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_before), cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#elif defined(__aarch64__) && defined(__linux__)
bool has_instructions() { return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0; }

// The instructions sha256h and sha256h2 compute four rounds. sha256su0 and sha256su1 compute four
// words of the message schedule.
__attribute__((target("+crypto"))) void compress_special(uint32_t* state, const uint8_t* blocks,
                                                         size_t count) {
  uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
  for (; count > 0; --count, blocks += 64) {
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    uint32x4_t w[4];
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
      uint32x4_t& now = w[group & 3];
      if (group < 4) {
        now = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(blocks + 16 * group)));
      } else {
        now = vsha256su1q_u32(vsha256su0q_u32(now, w[(group + 1) & 3]), w[(group + 2) & 3],
                              w[(group + 3) & 3]);
      }
      const uint32x4_t sum = vaddq_u32(now, vld1q_u32(kRounds + 4 * group)), abcd_then = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, abcd_then, sum);
    }
    abcd = vaddq_u32(abcd, abcd_before), efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd), vst1q_u32(state + 4, efgh);
}

#else
bool has_instructions() { return false; }
constexpr auto compress_special = compress_portable;
#endif

}  // namespace

bool Sha256::is_accelerated() { return has_instructions(); }

Sha256::Sha256(bool portable)
    : compress_(!portable && has_instructions() ? compress_special : compress_portable) {
  std::memcpy(state_, kInitial, sizeof state_);
}

void Sha256::update(const void* data, size_t bytes) {
  if (bytes == 0) return;  // `data` may be NULL, and memcpy does not accept NULL
  const uint8_t* from = static_cast<const uint8_t*>(data);
  total_bytes_ += bytes;
  if (pending_bytes_ > 0) {
    const size_t taken = bytes < 64 - pending_bytes_ ? bytes : 64 - pending_bytes_;
    std::memcpy(pending_ + pending_bytes_, from, taken);
    pending_bytes_ += taken, from += taken, bytes -= taken;
    if (pending_bytes_ < 64) return;
    compress_(state_, pending_, 1);
  }
  compress_(state_, from, bytes / 64);
  pending_bytes_ = bytes % 64;
  std::memcpy(pending_, from + (bytes - pending_bytes_), pending_bytes_);
}

std::array<uint8_t, 32> Sha256::digest() {
  // Pads the message to a multiple of 64 bytes. The padding consists of a bit with the value 1,
  // then bits with the value 0, then the length of the message in bits as a 64-bit number (section
  // 5.1.1).
  uint8_t padding[72] = {0x80};
  const size_t zeros_end = (pending_bytes_ < 56 ? 56 : 120) - pending_bytes_;
  for (size_t i = 0; i < 8; ++i)
    padding[zeros_end + i] = static_cast<uint8_t>(total_bytes_ * 8 >> (56 - 8 * i));
  update(padding, zeros_end + 8);
  std::array<uint8_t, 32> out;
  for (size_t i = 0; i < 32; ++i)
    out[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return out;
}

std::string Sha256::hex() {
  std::string out;
  for (const uint8_t byte : digest()) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

std::string sha256_file_hex(const std::string& path) {
  // With O_NONBLOCK, open() does not wait if the path is a pipe that has no writer. The flag has no
  // effect on plain files.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.is_open())
    throw Error(errno == ENOENT ? DLM_NOT_FOUND : DLM_BAD_BUNDLE,
                path + ": " + std::strerror(errno));
  return sha256_file_hex(file.number(), path);
}

std::string sha256_file_hex(int descriptor, const std::string& path) {
  const auto refuse = [&](const char* reason) {
    throw Error(DLM_BAD_BUNDLE, path + ": " + reason);
  };
  struct stat information;
  if (fstat(descriptor, &information) != 0) refuse(std::strerror(errno));
  if (!S_ISREG(information.st_mode)) refuse("not a plain file");
  constexpr size_t kPiece = size_t{1} << 20;
  const std::unique_ptr<uint8_t[]> buffer(new uint8_t[kPiece]);
  Sha256 hash;
  for (;;) {
    const ssize_t bytes = read(descriptor, buffer.get(), kPiece);
    if (bytes == 0) return hash.hex();
    if (bytes > 0) hash.update(buffer.get(), static_cast<size_t>(bytes));
    if (bytes < 0 && errno != EINTR) refuse(std::strerror(errno));
  }
}

}  // namespace dlm
