// Computes the exact weight of a text, so that two texts can be compared without rounding errors. A
// text with a larger weight is better. A token of the text is called ruled out if its logit is
// -inf, and cut if top_k or top_p excludes it. The weight has two parts. The first part counts the
// ruled-out tokens and the cut tokens. The second part is the exact sum of the logits of all other
// tokens. A sum in double would lose small logits when other logits are large.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dlm {

// The exact sum of several floats. The sum is stored as a 320-bit integer that counts units of
// 2^-149. Every finite float is less than 2^277 units, so 320 bits are enough for the sum of 2^40
// floats.
class ExactSum {
 public:
  ExactSum() = default;

  // `logit` must be finite.
  explicit ExactSum(float logit) {
    uint32_t bits;
    std::memcpy(&bits, &logit, sizeof bits);
    const uint32_t exponent = bits >> 23 & 0xFF, fraction = bits & 0x7FFFFF;
    // An exponent field of 0 means zero or a denormal.
    const uint64_t significand = exponent == 0 ? fraction : fraction | 0x800000;
    const uint32_t shift = exponent == 0 ? 0 : exponent - 1;
    const size_t word = shift / 64, bit = shift % 64;
    words_[word] = significand << bit;
    if (bit > 40) words_[word + 1] = significand >> (64 - bit);
    if (logit < 0) *this = ExactSum() - *this;
  }

  friend ExactSum operator+(const ExactSum& a, const ExactSum& b) { return a.combine(b, 0, 0); }
  friend ExactSum operator-(const ExactSum& a, const ExactSum& b) {
    return a.combine(b, ~uint64_t{0}, 1);
  }
  friend bool operator==(const ExactSum& a, const ExactSum& b) { return a.words_ == b.words_; }
  friend bool operator<(const ExactSum& a, const ExactSum& b) { return (a - b).is_negative(); }

  // Returns the sum as a double, accurate to a few units in the last place.
  double value() const {
    if (is_negative()) return -(ExactSum() - *this).value();
    double sum = 0;
    for (size_t i = kWords; i-- > 0;)
      sum += std::ldexp(static_cast<double>(words_[i]), static_cast<int>(64 * i) - 149);
    return sum;
  }

 private:
  static constexpr size_t kWords = 5;

  // Returns *this + (b ^ flip) + carry. With flip = ~0 and carry = 1, the result is *this - b.
  ExactSum combine(const ExactSum& b, uint64_t flip, uint64_t carry) const {
    ExactSum sum;
    for (size_t i = 0; i < kWords; ++i) {
      const uint64_t other = b.words_[i] ^ flip, partial = words_[i] + other;
      sum.words_[i] = partial + carry;
      carry = (partial < other ? 1 : 0) | (sum.words_[i] < partial ? 1 : 0);
    }
    return sum;
  }
  bool is_negative() const { return words_[kWords - 1] >> 63 != 0; }

  std::array<uint64_t, kWords> words_{};  // the sum in two's complement, lowest word first
};

// The weight of a text. `a < b` means that text `a` is worse than text `b`. The text with fewer
// ruled-out tokens is better. If these numbers are equal, the text with fewer cut tokens is better.
// If those are equal too, the text with the larger sum of logits is better.
struct ExactWeight {
  // Counts the ruled-out and cut tokens of the text. Each ruled-out token adds kRuledOut, and each
  // cut token adds kCut.
  int64_t avoided = 0;
  // The sum of the logits of all tokens that are neither ruled out nor cut. The best logit of the
  // row is subtracted from each logit.
  ExactSum sum;

  static constexpr int64_t kCut = 1, kRuledOut = int64_t{1} << 31, kNever = INT64_MAX / 2;

  static ExactWeight never() { return {kNever, {}}; }
  bool is_never() const { return avoided >= kNever; }
  friend ExactWeight operator+(const ExactWeight& a, const ExactWeight& b) {
    return {a.avoided + b.avoided, a.sum + b.sum};
  }
  friend bool operator==(const ExactWeight& a, const ExactWeight& b) {
    return a.avoided == b.avoided && a.sum == b.sum;
  }
  friend bool operator<(const ExactWeight& a, const ExactWeight& b) {
    return a.avoided != b.avoided ? a.avoided > b.avoided : a.sum < b.sum;
  }
};

// Sums of logits are first computed in double. If the magnitude of the best sum is at least this
// large, all sums are computed again exactly. Below this limit, the rounding errors of thousands of
// positions add up to less than 1e-6.
constexpr double kLargestRounded = 0x1p20;

}  // namespace dlm
