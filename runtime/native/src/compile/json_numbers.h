// Builds regular languages of the numbers in a range, as JSON writes them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compile/expression.h"

namespace dlm::compile {

// An exact decimal number: digits * 10^exponent. `digits` neither starts nor ends with a zero. It
// is empty if the number is zero.
struct Decimal {
  bool is_negative = false;
  bool is_plain = true;  // the text has neither a point nor an exponent
  std::string digits;
  int64_t exponent = 0;

  // Parses a JSON number. Throws if the exponent is beyond 100,000.
  static Decimal parse(std::string_view number);
  bool is_integer() const { return exponent >= 0; }
  bool is_zero() const { return digits.empty(); }
  // Returns a negative value, 0 or a positive value if this is less than, equal to or greater than
  // `other`.
  int compare(const Decimal& other) const;
};

struct NumberRange {
  std::optional<Decimal> low, high;
  bool low_excluded = false, high_excluded = false;
  bool integers = false;
  std::vector<Decimal> multiples;  // each is positive; numbers must be multiples of all
};

// Returns the texts of all numbers with at most two digits in the exponent. JSON readers parse such
// numbers to finite values.
Node any_number(Expressions& expressions);
// Returns the texts of the numbers in a range, or nothing() if the range is empty. Throws if the
// range is not supported; the message is the reason alone.
//
// Integers have no fraction and no exponent. Other bounded numbers have no exponent, and few digits
// after the point. So they are still inside the bounds after a reader rounds them to doubles.
//
// Multiples of an integer are always integers. Some fractions, such as 0.01, have no exact double.
// A number counts as a multiple of such a fraction if dividing them as doubles gives an integer.
// The result has the 10,000 such multiples nearest to zero inside the bounds, and such integers of
// up to six digits.
Node numbers(Expressions& expressions, const NumberRange& range);

}  // namespace dlm::compile
