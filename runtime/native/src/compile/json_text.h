// How JSON text spells characters, strings and numbers, as regular languages.
//
// A character of a string is written as itself wherever JSON allows that, or with an escape of two
// characters, as json.dumps(ensure_ascii=False) writes it. Characters that would need \uXXXX are
// not written at all, nor are DEL and the controls U+0080 to U+009F.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compile/expression.h"

namespace dlm::compile {

// One code point of `points` inside a JSON string.
Node spelled(Expressions& expressions, const CodePoints& points);
// Any one code point inside a JSON string.
Node any_character(Expressions& expressions);
// A string of `low` to `high` code points, with its quotes.
Node any_string(Expressions& expressions, uint32_t low = 0, uint32_t high = kUnbounded);
// The JSON text of a string, with its quotes, as json.dumps(ensure_ascii=False) writes it. `text`
// is UTF-8.
std::string json_string(std::string_view text);

// A decimal number without loss: digits * 10^exponent. `digits` has no zero at either end, and is
// empty for zero.
struct Decimal {
  bool is_negative = false;
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
// double still finds them inside the bounds. nothing() for an empty range. Throws for multiples
// that are not supported.
Node numbers(Expressions& expressions, const NumberRange& range);

}  // namespace dlm::compile
