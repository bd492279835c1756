// Builds regular languages of JSON numbers, for the keywords `minimum`, `maximum` and `multipleOf`
// of JSON Schema.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compile/expression.h"

namespace dlm::compile {

// An exact decimal number with the value `digits` * 10^`exponent`. For example, -1200 has the
// digits "12" and the exponent 2. `digits` is empty if the number is zero. Otherwise, the first
// digit and the last digit are not zero.
struct Decimal {
  bool is_negative = false;
  bool is_plain = true;  // whether the JSON text has no decimal point and no exponent
  std::string digits;
  int64_t exponent = 0;

  // Parses a JSON number. Throws if the exponent is greater than 100,000 or less than -100,000.
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
  std::vector<Decimal> multiples;  // each is positive; a number must be a multiple of each one
};

// Returns the texts of all numbers whose exponent has at most two digits. Every JSON reader parses
// such numbers to finite values.
Node any_number(Expressions& expressions);
// Returns the texts of the numbers in a range. Returns nothing() if the range is empty. Throws if
// the range is not supported. The error message has only the reason, so the caller must add the
// place.
//
// If `integers` is set, the numbers are written without a fraction and without an exponent. Other
// numbers with a bound are written without an exponent and with few digits after the point. So a
// number is still inside the bounds after a reader has rounded it to a double.
//
// If a divisor in `multiples` is an integer, all numbers are integers. A divisor such as 0.01 has
// no exact double. Validators divide the number by this divisor in doubles, and check that the
// result is an integer. The language contains only numbers that pass this check. These are up to
// 10,000 multiples around the value inside the bounds that is nearest to zero. If the check is
// exact for all integers of up to six digits, these integers are added.
Node numbers(Expressions& expressions, const NumberRange& range);

}  // namespace dlm::compile
