// Builds regular languages (sets of texts) of JSON numbers, for the keywords `minimum`, `maximum`
// and `multipleOf` of JSON Schema.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compile/automata/expression.h"

namespace dlm::compile {

// An exact decimal number. Its value is `digits` * 10^`exponent`, with a minus sign if is_negative
// is true. For example, -1200 has the digits "12" and the exponent 2. `digits` is empty if the
// number is zero. Otherwise, neither the first nor the last digit is zero.
struct Decimal {
  bool is_negative = false;
  bool is_plain = true;  // true if the number is written without a decimal point and exponent
  std::string digits;
  int64_t exponent = 0;

  // Parses a JSON number. Throws an error if the exponent is greater than 100,000 or less than
  // -100,000.
  static Decimal parse(std::string_view number);
  bool is_integer() const { return exponent >= 0; }
  // Returns the number if it is an integer of at most `most_digits` digits, which must be at most
  // 18. Otherwise returns nullopt.
  std::optional<int64_t> integer(int64_t most_digits) const;
  bool is_zero() const { return digits.empty(); }
  // Returns a negative number if this number is less than `other`. Returns 0 if this number equals
  // `other`. Otherwise returns a positive number.
  int compare(const Decimal& other) const;
};

struct NumberRange {
  std::optional<Decimal> low, high;
  bool low_excluded = false, high_excluded = false;
  bool integers = false;
  // Positive divisors. Each number in the range must be a multiple of every divisor.
  std::vector<Decimal> multiples;
};

// Returns the texts of all numbers without an exponent, or with an exponent of at most two digits.
// Every JSON parser reads these texts as finite numbers.
Node any_number(Expressions& expressions);
// Returns the texts of the numbers in a range. Returns nothing() if the range is empty. Throws an
// error if the range is not supported. The error message contains only the reason. So the caller
// must add the position in the schema.
//
// If `integers` is true, the texts contain no fraction and no exponent. If `integers` is false and
// the range has a bound, the texts contain no exponent, and only a few digits after the decimal
// point. With so few digits, a number stays inside the bounds when a program rounds it to a double.
//
// If a divisor in `multiples` is an integer, the function returns only integers. A divisor such as
// 0.01 has no exact double. Validators divide the number by this divisor in doubles, and check that
// the quotient is an integer. The function returns only multiples that pass this check. First, the
// function finds the number inside the bounds that is nearest to zero. It lists up to 10,000
// multiples around this number. Then the function adds all multiples that are integers of up to six
// digits, but only if all of these integers pass the check.
Node numbers(Expressions& expressions, const NumberRange& range);

}  // namespace dlm::compile
