// Builds the regular languages of strings, numbers, booleans and null. Each atom (smallest part) of
// the formula becomes a regular language (a set of texts). "And" becomes the intersection of
// languages, and "or" becomes their union.
#include <algorithm>

#include "compile/json/ecma_pattern.h"
#include "compile/json/formats.h"
#include "compile/schema/writer.h"

namespace dlm::compile::schema {
namespace {

// The largest supported count of characters, items or properties.
constexpr uint64_t kMostSchemaCount = 10'000;

Node digits(Expressions& expressions, char low, char high, uint32_t fewest, uint32_t most) {
  ByteSet set;
  for (char c = low; c <= high; ++c) set.set(static_cast<unsigned char>(c));
  return expressions.repeat(expressions.set(set), fewest, most);
}

// Limits for the number of digits of a number without an exponent. Integers have up to 15 digits.
// Other numbers have up to 9 digits before the decimal point, and up to 6 digits after it. Within
// these limits, different numbers are rounded to different doubles.
constexpr uint32_t kWholeDigits = 9, kFractionDigits = 6, kMostDigits = 15;

Node whole_number(Expressions& expressions, uint32_t most) {
  const Node whole = expressions.either(
      expressions.bytes("0"), expressions.sequence(digits(expressions, '1', '9', 1, 1),
                                                   digits(expressions, '0', '9', 0, most - 1)));
  return expressions.sequence(expressions.optional(expressions.bytes("-")), whole);
}

Node plain_numbers(Expressions& expressions) {
  const Node fraction = expressions.sequence(expressions.bytes("."),
                                             digits(expressions, '0', '9', 1, kFractionDigits));
  return expressions.either(
      whole_number(expressions, kMostDigits),
      expressions.sequence(whole_number(expressions, kWholeDigits), fraction));
}

// Returns the texts of the numbers with a fraction other than 0. The numbers have at most
// kWholeDigits digits before the decimal point and kFractionDigits digits after it.
Node plain_fractions(Expressions& expressions) {
  const Node zeros = digits(expressions, '0', '0', 1, kFractionDigits);
  const Node fraction =
      expressions.without(digits(expressions, '0', '9', 1, kFractionDigits), zeros);
  return expressions.sequence(
      {whole_number(expressions, kWholeDigits), expressions.bytes("."), fraction});
}

}  // namespace

// Returns the minimum of a count, for example the value of minLength. Throws an error if the
// minimum is too large, because the compiler must not reduce a minimum.
uint32_t Writer::low_count(const Term& term, Keyword keyword) {
  if (term.low > kMostSchemaCount)
    document_.refuse(
        *term.schema, keyword,
        "= " + std::to_string(term.low) + " is more than " + std::to_string(kMostSchemaCount));
  return static_cast<uint32_t>(term.low);
}

// Returns the maximum of a count, for example the value of maxLength. If the maximum is too large,
// adds a warning and returns the largest supported maximum.
uint32_t Writer::high_count(const Term& term, Keyword keyword) {
  if (term.high == kNoLimit) return kUnbounded;
  if (term.high > kMostSchemaCount)
    document_.warn("schema: " + document_.place(*term.schema->value) + ": keyword '" +
                   std::string(Document::name(keyword)) + "' = " + std::to_string(term.high) +
                   " is more than " + std::to_string(kMostSchemaCount) +
                   ", so this smaller number is used instead");
  return static_cast<uint32_t>(std::min(term.high, kMostSchemaCount));
}

Node Writer::scalar(Formula formula, uint8_t type, bool is_counted) {
  const uint64_t key = uint64_t{formula} << 9 | uint64_t{is_counted} << 8 | type;
  const auto known = scalars_.find(key);
  if (known != scalars_.end()) return known->second;
  expressions_.budget().check();
  const Op op = formulas_[formula].op;
  Node made = expressions_.nothing();
  if (op == Op::any || op == Op::one) {
    std::vector<Node> nodes;
    const std::vector<Formula> branches = formulas_.alternatives(formula);
    for (const Formula branch : branches) nodes.push_back(scalar(branch, type, is_counted));
    made = expressions_.either(std::move(nodes));
  } else if (op != Op::no) {
    made = scalar_case(formulas_.conjuncts(formula), type, is_counted);
  }
  return scalars_[key] = made;
}

Node Writer::scalar_case(const std::vector<Formula>& parts, uint8_t type, bool is_counted) {
  for (const Formula part : parts) {
    const Term& term = formulas_[part];
    if (term.op == Op::atom && term.atom == Atom::rejected)
      document_.refuse(*term.schema, term.keyword, "is not supported within a negation");
  }
  const ValueSet* const set = formulas_.listed(formulas_.all(parts));
  if (set != nullptr) {
    std::vector<Node> nodes;
    for (const json::Value* const value : set->values) {
      const bool is_valid = std::all_of(parts.begin(), parts.end(),
                                        [&](Formula part) { return holds_.value(part, *value); });
      if (is_valid) nodes.push_back(expressions_.bytes(text_of(*value, options_.layout, 0)));
    }
    return expressions_.either(std::move(nodes));
  }
  if (type == kNumber) return number_case(parts);
  if (type == kString) return string_case(parts, is_counted);
  Node made = type == kNull
                  ? expressions_.bytes("null")
                  : expressions_.either(expressions_.bytes("true"), expressions_.bytes("false"));
  for (const Formula part : parts) {
    const Term& term = formulas_[part];
    if (term.op != Op::atom) {
      made = expressions_.both(made, scalar(part, type));
    } else if (term.atom == Atom::values) {
      for (const json::Value* const value : term.values->values)
        made = expressions_.without(made, expressions_.bytes(text_of(*value, options_.layout, 0)));
    }
  }
  return made;
}

// ---- Numbers

Node Writer::number_case(const std::vector<Formula>& parts) {
  NumberRange range;
  std::vector<Node> others;
  const Term* named = nullptr;
  bool is_fraction = false;
  for (const Formula part : parts) {
    const Term& term = formulas_[part];
    if (term.op != Op::atom) {
      others.push_back(scalar(part, kNumber));
      continue;
    }
    switch (term.atom) {
      case Atom::integer:
        (term.positive ? range.integers : is_fraction) = true;
        break;
      case Atom::bound: {
        const bool is_low = term.high == 0;
        auto& bound = is_low ? range.low : range.high;
        bool& is_excluded = is_low ? range.low_excluded : range.high_excluded;
        const int order = bound.has_value() ? term.number.compare(*bound) * (is_low ? 1 : -1) : 1;
        if (order > 0) bound = term.number, is_excluded = term.low != 0;
        if (order == 0) is_excluded |= term.low != 0;
        if (named == nullptr) named = &term;
        break;
      }
      case Atom::multiple:
        if (term.positive) {
          range.multiples.push_back(term.number);
          named = &term;
        } else {
          others.push_back(not_multiple(term));
        }
        break;
      case Atom::values:
        others.push_back(other_numbers(*term.values));
        break;
      default:
        break;
    }
  }
  if (range.low.has_value() && range.high.has_value() && range.low->compare(*range.high) > 0)
    return expressions_.nothing();
  if (is_fraction || !others.empty() || named != nullptr)
    limits_.insert("numbers have a limited number of digits");
  if (is_fraction) {
    if (range.integers) return expressions_.nothing();
    others.push_back(plain_fractions(expressions_));
  }
  Node made;
  try {
    made = range.low.has_value() || range.high.has_value() || range.integers ||
                   !range.multiples.empty()
               ? numbers(expressions_, range)
               : any_number(expressions_);
  } catch (const Error& error) {
    if (named == nullptr || std::string_view(error.what()).substr(0, 6) == "regex:") throw;
    throw Error(error.status(),
                "schema: " + document_.place(*named->schema->value) + ": " + error.what());
  }
  for (const Node other : others) made = expressions_.both(made, other);
  return made;
}

Node Writer::not_multiple(const Term& term) {
  if (!term.number.is_integer())
    document_.refuse(*term.schema, Keyword::multiple_of,
                     "is not supported within a negation, except for integers");
  NumberRange range;
  range.integers = true;
  const Node integers = numbers(expressions_, range);
  range.multiples.push_back(term.number);
  const Node others = expressions_.without(
      integers, expressions_.either(numbers(expressions_, range), expressions_.bytes("-0")));
  return expressions_.either(others, plain_fractions(expressions_));
}

// Returns the texts of numbers without an exponent that are different from all numbers in `values`.
Node Writer::other_numbers(const ValueSet& values) {
  std::vector<Node> excluded;
  for (const json::Value* const value : values.values) {
    if (value->kind() != json::Value::Kind::number) continue;
    const Decimal number = Decimal::parse(value->written());
    // If a value has more digits than kMostDigits, a number with other digits may be rounded to the
    // same double. In this case, the function cannot exclude the value, so it returns no numbers.
    if (number.digits.size() > kMostDigits) return expressions_.nothing();
    std::string whole = "0", fraction;
    if (number.exponent >= 0) {
      if (!number.is_zero()) whole = number.digits;
      // Every finite double has fewer than kMostZeros digits before the decimal point.
      constexpr int64_t kMostZeros = 400;
      for (int64_t i = 0; i < std::min(number.exponent, kMostZeros); ++i) whole += '0';
    } else {
      const auto places = static_cast<size_t>(-number.exponent);
      std::string all = number.digits;
      if (all.size() <= places) all.insert(0, places + 1 - all.size(), '0');
      whole = all.substr(0, all.size() - places);
      fraction = all.substr(all.size() - places);
    }
    const Node zeros = digits(expressions_, '0', '0', 0, kUnbounded);
    const Node rest =
        fraction.empty()
            ? expressions_.optional(expressions_.sequence(expressions_.bytes(".0"), zeros))
            : expressions_.sequence(expressions_.bytes("." + fraction), zeros);
    const Node sign = number.is_zero() ? expressions_.optional(expressions_.bytes("-"))
                                       : expressions_.bytes(number.is_negative ? "-" : "");
    excluded.push_back(expressions_.sequence({sign, expressions_.bytes(whole), rest}));
  }
  return expressions_.without(plain_numbers(expressions_), expressions_.either(excluded));
}

// ---- Strings

Node Writer::string_that(const Term& term, bool is_counted) {
  // If `positive` is false, the pattern must not match. Then the code excludes all strings in which
  // at least one regex engine finds a match.
  const Found found_ = term.positive ? Found::surely : Found::perhaps;
  const char* const kind = term.atom == Atom::format ? is_counted ? "c" : "f"
                           : term.positive           ? "p"
                                                     : "n";
  const std::string key = kind + term.text;
  const auto known = patterns_.find(key);
  if (known != patterns_.end()) return known->second;
  Node inside;
  try {
    inside = term.atom == Atom::pattern ? pattern_in_string(expressions_, term.text, found_)
                                        : format_in_string(expressions_, term.text, is_counted);
  } catch (const Error& error) {
    if (std::string_view(error.what()).substr(0, 6) == "regex:") throw;
    throw Error(error.status(),
                "schema: " + document_.place(*term.schema->value) + ": " + error.what());
  }
  const Node quote = expressions_.bytes("\"");
  return patterns_[key] = expressions_.sequence({quote, inside, quote});
}

Node Writer::string_case(const std::vector<Formula>& parts, bool is_counted) {
  uint32_t low = 0, high = kUnbounded;
  const Term* length = nullptr;
  for (const Formula part : parts) {
    const Term& term = formulas_[part];
    if (term.op != Op::atom || term.atom != Atom::length) continue;
    low = std::max(low, low_count(term, Keyword::min_length));
    high = std::min(high, high_count(term, Keyword::max_length));
    length = &term;
  }
  if (low > high) return expressions_.nothing();
  if (high != kUnbounded && high > std::max(low, options_.most_characters)) {
    high = std::max(low, options_.most_characters);
    has_cut_strings_ = true;
  }
  // A minimum this small needs few more states.
  constexpr uint32_t kFew = 3;
  // Of the shorter names that a counted string has, few are longer than this.
  constexpr uint32_t kMany = 32;
  is_counted = is_counted || low > kFew || high != kUnbounded;
  const auto is_name = [](const std::string& format) {
    return format.find("host") != std::string::npos || format.find("email") != std::string::npos;
  };
  std::vector<Node> kept, removed;
  for (const Formula part : parts) {
    const Term& term = formulas_[part];
    if (term.op != Op::atom) {
      kept.push_back(scalar(part, kString, is_counted));
      continue;
    }
    switch (term.atom) {
      case Atom::pattern:
        (term.positive ? kept : removed).push_back(string_that(term, false));
        break;
      case Atom::format:
        if (!is_format(term.text)) break;
        if (length != nullptr)
          limits_.insert("strings in the format '" + term.text + "' have a limited length");
        kept.push_back(string_that(term, is_counted && !(low > kMany && is_name(term.text))));
        break;
      case Atom::values:
        for (const json::Value* const value : term.values->values) {
          if (value->kind() == json::Value::Kind::string)
            removed.push_back(expressions_.bytes(json_string(value->string())));
        }
        break;
      default:
        break;
    }
  }
  const bool is_product = !kept.empty() && length != nullptr;
  if (kept.empty() || low > 0 || high != kUnbounded)
    kept.push_back(any_string(expressions_, low, high));
  Node made = kept[0];
  for (size_t i = 1; i < kept.size(); ++i) made = expressions_.both(made, kept[i]);
  if (!removed.empty()) made = expressions_.without(made, expressions_.either(std::move(removed)));
  if (!is_product) return made;
  // The automaton of a pattern or a format that also has a length can be much larger than its
  // parts. The code builds the automaton here, because here an error can name the schema.
  try {
    return expressions_.machine(holds_.automata().of(made));
  } catch (const TooLarge& error) {
    throw TooLarge(
        "schema: " + document_.place(*length->schema->value) +
        ": this length is too large together with the string's other keywords: " + error.what());
  }
}

}  // namespace dlm::compile::schema
