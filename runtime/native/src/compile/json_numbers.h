// How JSON text spells the numbers of a range, as regular languages.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compile/expression.h"

namespace dlm::compile {

// A decimal number without loss: digits * 10^exponent. `digits` has no zero at either end, and is
// empty for zero.
struct Decimal {
  bool is_negative = false;
  bool is_plain = true;  // written without point and exponent
  std::string digits;
  int64_t exponent = 0;

  // Reads a number as JSON writes it. Throws for exponents beyond 100,000.
  static Decimal parse(std::string_view number);
  bool is_integer() const { return exponent >= 0; }
  bool is_zero() const { return digits.empty(); }
  // Below zero if this is less than `other`, 0 if they are equal.
  int compare(const Decimal& other) const;
};

struct NumberRange {
  std::optional<Decimal> low, high;
  bool low_excluded = false, high_excluded = false;
  bool integers = false;
  std::vector<Decimal> multiples;  // each is above zero, and divides the numbers
};

// Any number, with up to two digits of exponent: readers of JSON keep such numbers finite.
Node any_number(Expressions& expressions);
// The numbers of a range. Integers are written without fraction and exponent, other bounded
// numbers without exponent and with few digits after the point, so that a reader that rounds to a
// double still finds them inside the bounds. nothing() for an empty range. Throws a reason for what
// is not supported.
//
// Multiples of an integer are integers. Multiples of a fraction whose double is not exact, such as
// 0.01, are those whose division gives an integer in doubles, among the 10,000 next to zero inside
// the bounds, and integers of up to six digits.
Node numbers(Expressions& expressions, const NumberRange& range);

}  // namespace dlm::compile
