#include "compile/json/json_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "base/error.h"
#include "compile/automata/byte_automaton.h"

namespace dlm::compile {
namespace {

constexpr int64_t kMostExponent = 100000;
// The largest number of digits that a bound may have before the decimal point.
constexpr size_t kMostWholeDigits = 400;
// If a number has at most nine digits before the decimal point, a double preserves six digits after
// the decimal point.
constexpr size_t kFractionDigits = 6;
constexpr size_t kExactDigits = 15;  // number of decimal digits that every double preserves
constexpr uint64_t kMostRemainders = 5000;
// rounded_multiples() lists at most this many multiples one by one.
constexpr int64_t kMostListed = 10000;
// rounded_multiples() lists multiples only if a number in the range has an absolute value below
// this limit.
constexpr double kMostNearest = 1e6;
constexpr int64_t kSixDigits = 1000000;

[[noreturn]] void refuse(const char* reason) { throw Error(DLM_INVALID_ARGUMENT, reason); }

// A lower or upper bound of a range of non-negative numbers.
struct Bound {
  std::string whole = "0";  // the digits before the decimal point, without leading zeros
  std::string fraction;     // the digits after the decimal point, padded with zeros
  bool is_excluded = false;
  // True if the schema writes the number without a decimal point and exponent. Then programs parse
  // the number as an integer.
  bool is_plain = true;
};

Bound bound_of(const Decimal& value, bool is_excluded) {
  Bound bound;
  bound.is_excluded = is_excluded;
  bound.is_plain = value.is_plain;
  const auto size = static_cast<int64_t>(value.digits.size());
  if (size + value.exponent > static_cast<int64_t>(kMostWholeDigits))
    refuse("a bound of more than 400 digits is not supported");
  if (value.is_zero()) return bound;
  const int64_t whole = std::max<int64_t>(size + value.exponent, 0);
  const std::string_view digits = value.digits;
  if (whole > 0) {
    bound.whole = digits.substr(0, static_cast<size_t>(std::min(whole, size)));
    bound.whole.append(static_cast<size_t>(whole) - bound.whole.size(), '0');
  }
  if (value.exponent < 0) {
    const int64_t zeros = std::max<int64_t>(-value.exponent - size, 0);
    bound.fraction.assign(static_cast<size_t>(zeros), '0');
    bound.fraction += digits.substr(static_cast<size_t>(std::min(whole, size)));
  }
  return bound;
}

// Makes a range slightly smaller if its bound has more than 15 digits. The bound moves by one unit
// of its 15th digit, because doubles represent only 15 digits reliably. Without the change, a
// program could round a number close to the bound to the wrong side of the bound.
void keep_away(Bound& bound, bool is_low) {
  std::string digits = bound.whole + bound.fraction;
  const size_t places = bound.fraction.size();
  for (size_t at = kExactDigits; at-- > 0;) {
    const char last = is_low ? '9' : '0';
    if (digits[at] != last) {
      digits[at] = static_cast<char>(digits[at] + (is_low ? 1 : -1));
      break;
    }
    digits[at] = is_low ? '0' : '9';
    if (at == 0) digits = is_low ? "1" + digits : std::string(digits.size(), '0');
  }
  bound.fraction = digits.substr(digits.size() - places);
  digits.resize(digits.size() - places);
  bound.whole = digits.substr(std::min(digits.find_first_not_of('0'), digits.size() - 1));
  bound.is_excluded = false;
}

// Builds the texts of the non-negative numbers between two bounds. The functions process a number
// digit by digit, like an automaton. If the parameter `is_low` is true, all digits so far equal the
// digits of the lower bound. So the next digit must not be smaller than the next digit of the lower
// bound. The parameter `is_high` has the same meaning for the upper bound.
class Naturals {
 public:
  Naturals(Expressions& expressions, const Bound& low, const std::optional<Bound>& high,
           size_t fraction_digits)
      : expressions_(expressions), low_(low), has_high_(high.has_value()), most_(fraction_digits) {
    if (high) high_ = *high;
    // Cuts the bounds to `most_` digits after the decimal point, because the numbers have no more
    // digits after the decimal point. If the cut removes a digit other than 0, the cut bound is
    // smaller than the real bound. So a number must not equal the cut lower bound, but it may equal
    // the cut upper bound.
    const auto cut = [&](Bound& bound, bool is_low) {
      const bool is_between = bound.fraction.size() > most_ &&
                              bound.fraction.find_first_not_of('0', most_) != std::string::npos;
      bound.fraction.resize(most_, '0');
      if (is_between) bound.is_excluded = is_low;
    };
    cut(low_, true);
    cut(high_, false);
    const ByteSet digits = set('0', '9');
    digit_ = expressions_.set(digits);
    make_fractions();
  }

  Node texts() {
    const size_t first = low_.whole.size();
    if (has_high_ && high_.whole.size() < first) return expressions_.nothing();
    std::vector<Node> choices{of_length(first)};
    if (!has_high_) {
      choices.push_back(longer(first, kUnbounded));
    } else if (const size_t last = high_.whole.size(); last > first) {
      choices.push_back(of_length(last));
      if (last > first + 1) choices.push_back(longer(first, static_cast<uint32_t>(last - 2)));
    }
    return expressions_.either(std::move(choices));
  }

 private:
  // The texts that may follow a digit, for each combination of is_low and is_high.
  using Tight = std::array<std::array<Node, 2>, 2>;

  static ByteSet set(char low, char high) {
    ByteSet bytes;
    for (int byte = low; byte <= high; ++byte) bytes.set(static_cast<size_t>(byte));
    return bytes;
  }

  // Returns the texts of the numbers with `digits + 1` to `most + 1` digits before the decimal
  // point.
  Node longer(size_t digits, uint32_t most) {
    return expressions_.sequence({expressions_.set(set('1', '9')),
                                  expressions_.repeat(digit_, static_cast<uint32_t>(digits), most),
                                  fractions_[0][0]});
  }

  // Returns the texts that start with the next digit. `after` contains the texts that may follow
  // this digit. `low` and `high` are the digits of the two bounds at this position.
  Node step(bool is_low, bool is_high, char low, char high, bool is_first, const Tight& after) {
    std::vector<Node> choices;
    const char least = is_low ? low : '0', most = is_high ? high : '9';
    char inner_low = least, inner_high = most;
    const auto add = [&](char digit, bool low_after, bool high_after) {
      if (is_first && digit == '0') return;
      choices.push_back(
          expressions_.sequence(expressions_.set(set(digit, digit)), after[low_after][high_after]));
    };
    if (least > most) return expressions_.nothing();
    if (is_low) {
      add(low, true, is_high && low == high);
      ++inner_low;
    }
    if (is_high && !(is_low && low == high)) {
      add(high, false, true);
      --inner_high;
    }
    if (is_first && inner_low == '0') inner_low = '1';
    if (inner_low <= inner_high)
      choices.push_back(
          expressions_.sequence(expressions_.set(set(inner_low, inner_high)), after[0][0]));
    return expressions_.either(std::move(choices));
  }

  // Returns true if a number may end before the digit with the index `from` after the decimal
  // point. The missing digits are then zeros.
  bool may_end(bool is_low, bool is_high, size_t from) const {
    const auto is_zero = [&](const Bound& bound) {
      return bound.fraction.find_first_not_of('0', from) == std::string::npos;
    };
    if (is_low && (low_.is_excluded || !is_zero(low_))) return false;
    return !(is_high && high_.is_excluded && is_zero(high_));
  }

  void make_fractions() {
    Tight after{};  // the texts that may follow the current digit
    for (size_t from = most_;; --from) {
      Tight made{};
      for (const bool is_low : {false, true})
        for (const bool is_high : {false, true}) {
          const Node end =
              may_end(is_low, is_high, from) ? expressions_.empty() : expressions_.nothing();
          Node more = from == most_ ? expressions_.nothing()
                                    : step(is_low, is_high, low_.fraction[from],
                                           high_.fraction[from], false, after);
          if (from == 0) more = expressions_.sequence(expressions_.bytes("."), more);
          made[is_low][is_high] = expressions_.either(end, more);
        }
      after = made;
      if (from == 0) break;
    }
    fractions_ = after;
  }

  Node of_length(size_t digits) {
    const bool has_low = digits == low_.whole.size();
    const bool has_high = has_high_ && digits == high_.whole.size();
    Tight after = fractions_;
    for (size_t at = digits; at-- > 0;) {
      Tight made{};
      for (const bool is_low : {false, true})
        for (const bool is_high : {false, true})
          made[is_low][is_high] =
              step(is_low, is_high, has_low ? low_.whole[at] : '0',
                   has_high ? high_.whole[at] : '9', at == 0 && digits > 1, after);
      after = made;
    }
    return after[has_low][has_high];
  }

  Expressions& expressions_;
  Bound low_, high_;
  const bool has_high_;
  const size_t most_;
  Node digit_ = 0;
  Tight fractions_{};
};

Node naturals(Expressions& expressions, Bound low, std::optional<Bound> high, size_t most,
              bool integers) {
  // The largest number of digits before the decimal point in any excluded bound.
  size_t excluded_digits = 0;
  const auto prepare = [&](Bound& bound, bool is_low) {
    const size_t whole = bound.whole.size(), digits = whole + bound.fraction.size();
    const bool is_exact = integers && bound.is_plain;
    if (!is_exact && (whole > kExactDigits || (bound.is_excluded && digits > kExactDigits)))
      keep_away(bound, is_low);
    if (bound.is_excluded) excluded_digits = std::max(excluded_digits, whole);
    most = std::max(most, bound.fraction.size());
  };
  prepare(low, true);
  if (high) prepare(*high, false);
  if (excluded_digits > 0)
    most = std::min(most, kExactDigits - std::min(excluded_digits, kExactDigits));
  return Naturals(expressions, low, high, integers ? 0 : most).texts();
}

Node in_range(Expressions& e, const NumberRange& range, size_t fraction_digits) {
  const auto sign = [](const std::optional<Decimal>& bound) {
    return !bound || bound->is_zero() ? 0 : bound->is_negative ? -1 : 1;
  };
  std::vector<Node> choices;
  if (sign(range.high) >= 0) {
    const bool has_low = range.low && sign(range.low) >= 0;
    const Bound low = has_low ? bound_of(*range.low, range.low_excluded) : Bound{};
    std::optional<Bound> high;
    if (range.high) high = bound_of(*range.high, range.high_excluded);
    choices.push_back(naturals(e, low, high, fraction_digits, range.integers));
  }
  if (!range.low || sign(range.low) < 0) {
    Bound low;
    low.is_excluded = true;  // excludes -0, because zero is written without a sign
    if (range.high && sign(range.high) < 0) low = bound_of(*range.high, range.high_excluded);
    std::optional<Bound> high;
    if (range.low) high = bound_of(*range.low, range.low_excluded);
    choices.push_back(
        e.sequence(e.bytes("-"), naturals(e, low, high, fraction_digits, range.integers)));
  }
  return e.either(std::move(choices));
}

// ---- Multiples ----

// Returns the texts of the multiples of `divisor` * 10^-`places`. The texts have at most `places`
// digits after the decimal point. The result also contains texts that are not valid numbers. So the
// caller must intersect the result with the texts of valid numbers.
Node with_remainder(Expressions& expressions, uint64_t divisor, size_t places) {
  if (divisor > kMostRemainders) refuse("multipleOf with so many digits is not supported");
  // State 0 is the start state. Every other state is a pair of a phase and a remainder (of the
  // digits so far, divided by `divisor`). The phase is 0 before the decimal point. The decimal
  // point and each digit after it increase the phase by 1.
  const size_t phases = places == 0 ? 1 : places + 2;
  const auto state = [&](size_t phase, uint64_t remainder) {
    return static_cast<int32_t>(1 + phase * divisor + remainder % divisor);
  };
  std::vector<uint64_t> powers{1 % divisor};  // the powers of ten modulo `divisor`
  for (size_t i = 0; i < places; ++i) powers.push_back(powers.back() * 10 % divisor);
  ByteAutomaton automaton;
  const auto digits = [&](size_t phase, uint64_t remainder) {
    for (uint64_t digit = 0; digit < 10; ++digit) {
      const auto byte = static_cast<uint8_t>('0' + digit);
      append_edge(automaton, byte, byte, state(phase, remainder * 10 + digit));
    }
  };
  automaton.starts = {0};
  automaton.accepting = {0};
  append_edge(automaton, '-', '-', 0);
  digits(0, 0);
  for (size_t phase = 0; phase < phases; ++phase)
    for (uint64_t remainder = 0; remainder < divisor; ++remainder) {
      expressions.budget().check();
      automaton.starts.push_back(static_cast<uint32_t>(automaton.edges.size()));
      const size_t missing = phase == 0 ? places : places + 1 - phase;
      automaton.accepting.push_back(remainder * powers[missing] % divisor == 0);
      if (phase == 0 && places > 0) append_edge(automaton, '.', '.', state(1, remainder));
      if (phase == 0) digits(0, remainder);
      if (phase > 0 && missing > 0) digits(phase + 1, remainder);
    }
  automaton.starts.push_back(static_cast<uint32_t>(automaton.edges.size()));
  return expressions.machine(automaton);
}

// Parses a number of at most nine digits. Throws an error if there are more digits.
uint64_t number_of(const std::string& digits) {
  if (digits.size() > 9) refuse("multipleOf with so many digits is not supported");
  return std::strtoull(digits.c_str(), nullptr, 10);
}

uint64_t power(uint64_t base, size_t exponent) {
  uint64_t made = 1;
  for (; exponent > 0; --exponent) made *= base;
  return made;
}

// Returns the texts of the integers that are multiples of the integer `divisor`.
Node integer_multiples(Expressions& e, const Decimal& divisor) {
  const Node tens = with_remainder(e, number_of(divisor.digits), 0);
  if (divisor.exponent == 0) return tens;
  if (divisor.exponent > static_cast<int64_t>(kMostWholeDigits))
    refuse("multipleOf with more than 400 digits is not supported");
  return e.either(
      e.bytes("0"),
      e.sequence(tens, e.bytes(std::string(static_cast<size_t>(divisor.exponent), '0'))));
}

// Returns the texts of the numbers with up to `digits` digits before the decimal point and up to
// `places` digits after it.
Node with_digits(Expressions& e, size_t digits, size_t places) {
  NumberRange range;
  range.integers = places == 0;
  range.high = Decimal{false, true, std::string(digits, '9'), 0};
  range.low = Decimal{true, true, std::string(digits, '9'), 0};
  return in_range(e, range, places);
}

// Returns true if `multiple` / `divisor`, computed in doubles, is an integer.
bool divides(const std::string& multiple, double divisor) {
  const double quotient = std::strtod(multiple.c_str(), nullptr) / divisor;
  return std::isfinite(quotient) && quotient == std::trunc(quotient);
}

// Returns `count` * 10^-`places` as JSON text. For example, written(15, 1) returns "1.5".
std::string written(int64_t count, size_t places) {
  std::string digits = std::to_string(std::abs(count));
  if (digits.size() <= places) digits.insert(0, places + 1 - digits.size(), '0');
  digits.insert(digits.size() - places, ".");
  while (digits.back() == '0') digits.pop_back();
  if (digits.back() == '.') digits.pop_back();
  return count < 0 ? "-" + digits : digits;
}

// Returns the texts of multiples of the fraction `units` * 10^-`places`. This function is for
// fractions that a double cannot represent exactly. The comment of numbers() in json_numbers.h
// explains which multiples are included.
Node rounded_multiples(Expressions& e, const NumberRange& range, int64_t units, size_t places) {
  const auto tens = static_cast<int64_t>(power(10, places));
  const double divisor = static_cast<double>(units) / static_cast<double>(tens);
  const auto double_of = [](const Decimal& value) {
    const std::string text = (value.is_negative ? "-" : "") +
                             (value.is_zero() ? "0" : value.digits) + "e" +
                             std::to_string(value.exponent);
    return std::strtod(text.c_str(), nullptr);
  };
  const double low = range.low ? double_of(*range.low) : -HUGE_VAL;
  const double high = range.high ? double_of(*range.high) : HUGE_VAL;
  std::vector<Node> choices;
  const double nearest = low > 0 ? low : high < 0 ? high : 0;
  if (std::abs(nearest) < kMostNearest) {
    const auto middle = static_cast<int64_t>(nearest / divisor);
    for (int64_t count = middle - kMostListed / 2; count < middle + kMostListed / 2; ++count) {
      e.budget().check();
      const std::string text = written(count * units, places);
      if (divides(text, divisor)) choices.push_back(e.bytes(text));
    }
  }
  // Adds all multiples that are integers below a million. Validators divide an integer by the
  // divisor in doubles. If one of the quotients is not an integer, the code adds none of these
  // multiples.
  int64_t step = units;
  for (int64_t other = tens; other != 0;) step = std::exchange(other, step % other);
  step = units / step;
  bool is_exact = step <= static_cast<int64_t>(kMostRemainders);
  for (int64_t value = 0; is_exact && value < kSixDigits; value += step) {
    e.budget().check();
    const double quotient = static_cast<double>(value) / divisor;
    is_exact = quotient == std::trunc(quotient);
  }
  if (is_exact)
    choices.push_back(
        e.both(with_digits(e, 6, 0), with_remainder(e, static_cast<uint64_t>(step), 0)));
  return e.either(std::move(choices));
}

Node fraction_multiples(Expressions& e, const NumberRange& range, const Decimal& divisor) {
  if (divisor.exponent < -9)
    refuse("multipleOf with more than nine digits after the point is not supported");
  const auto places = static_cast<size_t>(-divisor.exponent);
  const uint64_t units = number_of(divisor.digits);
  if (units % power(5, places) != 0)
    return rounded_multiples(e, range, static_cast<int64_t>(units), places);
  return e.both(with_digits(e, kExactDigits - places, range.integers ? 0 : places),
                with_remainder(e, units, places));
}

Node integers(Expressions& e) {
  ByteSet digits;
  for (char digit = '0'; digit <= '9'; ++digit) digits.set(static_cast<size_t>(digit));
  ByteSet first = digits;
  first.reset('0');
  const Node more = e.repeat(e.set(digits), 0, kUnbounded);
  return e.sequence(e.optional(e.bytes("-")),
                    e.either(e.bytes("0"), e.sequence(e.set(first), more)));
}

}  // namespace

Decimal Decimal::parse(std::string_view number) {
  Decimal value;
  size_t at = 0;
  value.is_negative = number.substr(0, 1) == "-";
  if (value.is_negative) ++at;
  int64_t places = 0;
  bool is_fraction = false;
  for (; at < number.size() && number[at] != 'e' && number[at] != 'E'; ++at) {
    if (number[at] == '.') {
      is_fraction = true;
      continue;
    }
    value.digits += number[at];
    places += is_fraction ? 1 : 0;
  }
  value.is_plain = !is_fraction && at == number.size();
  if (at < number.size()) {
    const std::string exponent(number.substr(at + 1));
    value.exponent =
        exponent.size() > 8 ? kMostExponent + 1 : std::strtoll(exponent.c_str(), nullptr, 10);
    if (std::abs(value.exponent) > kMostExponent)
      refuse("a number with an exponent beyond 100,000 is not supported");
  }
  value.exponent -= places;
  value.digits.erase(0, std::min(value.digits.find_first_not_of('0'), value.digits.size()));
  while (!value.digits.empty() && value.digits.back() == '0') {
    value.digits.pop_back();
    ++value.exponent;
  }
  if (value.digits.empty()) {
    value.exponent = 0;
    value.is_negative = false;
  }
  return value;
}

std::optional<int64_t> Decimal::integer(int64_t most_digits) const {
  if (!is_integer() || static_cast<int64_t>(digits.size()) + exponent > most_digits)
    return std::nullopt;
  int64_t found = is_zero() ? 0 : std::stoll(digits);
  for (int64_t i = 0; i < exponent; ++i) found *= 10;
  return is_negative ? -found : found;
}

int Decimal::compare(const Decimal& other) const {
  const int sign = is_negative ? -1 : 1;
  if (is_zero() || other.is_zero() || is_negative != other.is_negative) {
    const auto signum = [](const Decimal& value) {
      return value.is_zero() ? 0 : value.is_negative ? -1 : 1;
    };
    return signum(*this) - signum(other);
  }
  const int64_t size = static_cast<int64_t>(digits.size()) + exponent;
  const int64_t other_size = static_cast<int64_t>(other.digits.size()) + other.exponent;
  if (size != other_size) return size < other_size ? -sign : sign;
  return sign * digits.compare(other.digits);
}

Node any_number(Expressions& e) {
  ByteSet digits, exponent, sign;
  for (char digit = '0'; digit <= '9'; ++digit) digits.set(static_cast<size_t>(digit));
  exponent.set('e').set('E');
  sign.set('+').set('-');
  const Node digit = e.set(digits);
  return e.sequence(
      {integers(e), e.optional(e.sequence(e.bytes("."), e.repeat(digit, 1, kUnbounded))),
       e.optional(e.sequence({e.set(exponent), e.optional(e.set(sign)), e.repeat(digit, 1, 2)}))});
}

Node numbers(Expressions& e, const NumberRange& range) {
  NumberRange bounded = range;
  size_t places = kFractionDigits;
  for (const Decimal& divisor : range.multiples) {
    if (divisor.is_integer())
      bounded.integers = true;
    else
      places = std::max(places, static_cast<size_t>(std::min<int64_t>(-divisor.exponent, 9)));
  }
  const bool is_bounded = range.low || range.high;
  Node made = is_bounded         ? in_range(e, bounded, places)
              : bounded.integers ? integers(e)
                                 : any_number(e);
  for (const Decimal& divisor : range.multiples) {
    if (!divisor.is_integer()) {
      made = e.both(made, fraction_multiples(e, bounded, divisor));
      continue;
    }
    made = e.both(made, integer_multiples(e, divisor));
    // If the schema writes the divisor with a decimal point or an exponent, validators compute with
    // doubles. Doubles represent only 15 digits reliably, so the number may have at most 15 digits.
    if (!divisor.is_plain) made = e.both(made, with_digits(e, kExactDigits, 0));
  }
  return made;
}

}  // namespace dlm::compile
