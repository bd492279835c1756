#include "compile/schema/holds.h"

#include <algorithm>

#include "base/utf8.h"
#include "compile/json/formats.h"
#include "compile/schema/keywords.h"
#include "compile/schema/layout.h"

namespace dlm::compile::schema {
namespace {

using json::Value;

bool is_within(uint64_t count, const Term& term) { return count >= term.low && count <= term.high; }

// Returns true if the first number is a multiple of the second. If the computation would take too
// long, sets *is_decided to false. In this case, the returned value has no meaning.
bool is_multiple(const Decimal& number, const Decimal& of, bool* is_decided) {
  if (number.is_zero()) return true;
  const int64_t shift = number.exponent - of.exponent;
  constexpr int64_t kMost = 400;
  constexpr size_t kMostDigits = 18;  // with this limit, ten times a remainder fits into 64 bits
  if (shift > kMost || shift < -kMost || of.digits.size() > kMostDigits) {
    *is_decided = false;
    return false;
  }
  // Each number is an integer (its digits) times a power of ten. So the code tests if the first
  // number's digits times 10^shift are a multiple of the second number's digits. If the shift is
  // negative, the first number's digits would have to be divisible by a power of ten. But their
  // last digit is not zero.
  if (shift < 0) return false;
  const uint64_t divisor = std::stoull(of.digits);
  uint64_t rest = 0;
  for (const char digit : number.digits)
    rest = (rest * 10 + static_cast<uint64_t>(digit - '0')) % divisor;
  for (int64_t i = 0; i < shift; ++i) rest = rest * 10 % divisor;
  return rest == 0;
}

}  // namespace

template <typename Test>
bool Holds::connected(const Term& term, const Test& test) {
  const auto& parts = term.parts;
  switch (term.op) {
    case Op::no:
      return false;
    case Op::yes:
      return true;
    case Op::all:
      return std::all_of(parts.begin(), parts.end(), test);
    case Op::any:
      return std::any_of(parts.begin(), parts.end(), test);
    case Op::one: {
      // `parts` contains the branches, each followed by its negation.
      size_t valid = 0, undecided = 0;
      for (size_t i = 0; i < parts.size() && valid < 2; i += 2) {
        if (test(parts[i])) {
          ++valid;
        } else if (!test(parts[i + 1])) {
          ++undecided;
        }
      }
      return valid == 1 && undecided == 0;
    }
    case Op::atom:
      break;
  }
  return false;
}

bool Holds::value(Formula formula, const Value& value_) {
  expressions_.budget().check();
  const Term& term = formulas_[formula];
  if (term.op == Op::atom) return atom(term, value_);
  return connected(term, [&](Formula part) { return value(part, value_); });
}

bool Holds::text(Formula formula, const std::string& text_) {
  expressions_.budget().check();
  const Term& term = formulas_[formula];
  if (term.op == Op::atom) return text_atom(term, text_);
  return connected(term, [&](Formula part) { return text(part, text_); });
}

bool Holds::matches(const std::string& pattern, const std::string& name, const Schema& at) {
  const bool is_sure = matches(pattern, name, at, Found::surely);
  // All regex engines agree on printable ASCII characters.
  const bool is_plain = std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) >= ' ' && static_cast<unsigned char>(c) < 0x7F;
  });
  if (!is_plain && !is_sure && matches(pattern, name, at, Found::perhaps))
    throw Error(DLM_INVALID_ARGUMENT,
                "schema: " + formulas_.document().place(*at.value) + ": pattern " +
                    json::quoted(pattern) + " matches the property " + json::quoted(name) +
                    " to some validators and not to others: write the characters that it means "
                    "instead of \\d, \\w, \\s, \\b, . or $");
  return is_sure;
}

bool Holds::matches(const std::string& pattern, const std::string& text_, const Schema& at,
                    Found found_) {
  auto& patterns = patterns_[static_cast<size_t>(found_)];
  auto found = patterns.find(pattern);
  if (found == patterns.end()) {
    try {
      found = patterns.emplace(pattern, pattern_in_text(expressions_, pattern, found_)).first;
    } catch (const Error& error) {
      throw Error(error.status(),
                  "schema: " + formulas_.document().place(*at.value) + ": " + error.what());
    }
  }
  return automata_.of(found->second).matches(text_);
}

bool Holds::text_atom(const Term& term, const std::string& text_) {
  switch (term.atom) {
    case Atom::type:
      return (term.kinds & kString) != 0;
    case Atom::values:
      return (term.values->lookup.count("s" + std::to_string(text_.size()) + ":" + text_) != 0) ==
             term.positive;
    case Atom::length:
      return is_within(count_chars(text_), term);
    case Atom::pattern:
      return matches(term.text, text_, *term.schema,
                     term.positive ? Found::surely : Found::perhaps) == term.positive;
    case Atom::format: {
      if (!is_format(term.text)) return true;
      auto found = formats_.find(term.text);
      if (found == formats_.end())
        found = formats_.emplace(term.text, format_in_string(expressions_, term.text, false)).first;
      const std::string written = json_string(text_);
      return automata_.of(found->second)
          .matches(std::string_view(written).substr(1, written.size() - 2));
    }
    case Atom::rejected:
      if ((term.speaks_of & kString) != 0) break;
      return true;
    default:
      return true;
  }
  return false;
}

bool Holds::atom(const Term& term, const Value& value_) {
  if (term.atom == Atom::type) {
    const uint8_t kinds = formulas_.kinds_of(value_);
    // A number such as 1.0 is an integer, except in Draft 4.
    if (kinds == kNumber)
      return (term.kinds & kNumber) == kNumber ||
             ((term.kinds & kNumber) == kInteger && term.low == 0);
    return (kinds & term.kinds) != 0;
  }
  if (term.atom == Atom::values)
    return (term.values->lookup.count(key_of(value_)) != 0) == term.positive;
  if (term.atom == Atom::rejected && (formulas_.kinds_of(value_) & term.speaks_of) != 0)
    formulas_.document().refuse(*term.schema, term.keyword, "is not supported within a negation");
  switch (value_.kind()) {
    case Value::Kind::number:
      return number(term, value_);
    case Value::Kind::string:
      return text_atom(term, value_.string());
    case Value::Kind::array:
      return array(term, value_);
    case Value::Kind::object:
      return object(term, value_);
    default:
      return true;
  }
}

bool Holds::number(const Term& term, const Value& value_) const {
  const Decimal found = Decimal::parse(value_.written());
  switch (term.atom) {
    case Atom::integer: {
      const uint8_t kinds = Formulas::kinds_of(value_);
      if (kinds == kNumber) return term.positive && term.low == 0;
      return (kinds == kInteger) == term.positive;
    }
    case Atom::bound: {
      const int order = found.compare(term.number) * (term.high == 0 ? 1 : -1);
      return order > 0 || (order == 0 && term.low == 0);
    }
    case Atom::multiple: {
      bool is_decided = true;
      const bool is_one = is_multiple(found, term.number, &is_decided);
      return is_decided && is_one == term.positive;
    }
    default:
      return true;
  }
}

bool Holds::array(const Term& term, const Value& value_) {
  const std::vector<Value>& items = value_.elements();
  const auto is_valid = [&](const Schema& schema, bool positive, const Value& item) {
    return value(formulas_.of(schema, positive), item);
  };
  Document& document = formulas_.document();
  switch (term.atom) {
    case Atom::item_count:
      return is_within(items.size(), term);
    case Atom::items: {
      const ItemSchemas schemas = item_schemas(*term.schema);
      for (size_t i = 0; i < items.size(); ++i) {
        const Value* const schema = schemas.at(i);
        if (schema != nullptr && !is_valid(document.schema(*schema), true, items[i])) return false;
      }
      return true;
    }
    case Atom::item:
      return term.low >= items.size() || is_valid(*term.schema, term.inner, items[term.low]);
    case Atom::matches: {
      uint64_t matching = 0, undecided = 0;
      for (size_t i = term.first; i < items.size(); ++i) {
        if (is_valid(*term.schema, term.inner, items[i])) {
          ++matching;
        } else if (term.high != kNoLimit && !is_valid(*term.schema, !term.inner, items[i])) {
          ++undecided;
        }
      }
      return matching >= term.low && (term.high == kNoLimit || matching + undecided <= term.high);
    }
    case Atom::unique: {
      std::unordered_set<std::string> seen;
      return std::all_of(items.begin(), items.end(),
                         [&](const Value& item) { return seen.insert(key_of(item)).second; });
    }
    case Atom::unevaluated_items:
      document.refuse(*term.schema, Keyword::unevaluated_items,
                      "is not supported beside enum and const");
    default:
      return true;
  }
}

std::vector<const Value*> Holds::unlisted(const Schema& schema, const std::string& name) {
  std::vector<const Value*> found;
  bool is_listed = schema.properties.count(name) != 0;
  if (const Value* const patterns = schema[Keyword::pattern_properties]) {
    for (const Value& each : patterns->members()) {
      if (!matches(each.key(), name, schema)) continue;
      is_listed = true;
      found.push_back(&each);
    }
  }
  const Value* const others = schema[Keyword::additional_properties];
  if (!is_listed && others != nullptr) found.push_back(others);
  return found;
}

bool Holds::object(const Term& term, const Value& value_) {
  const std::vector<Value>& members = value_.members();
  Document& document = formulas_.document();
  const auto is_valid = [&](const Value& schema, bool positive, const Value& member) {
    return value(formulas_.of(document.schema(schema), positive), member);
  };
  switch (term.atom) {
    case Atom::property_count:
      return is_within(members.size(), term);
    case Atom::has:
      return (value_.find(term.text) != nullptr) == term.positive;
    case Atom::member: {
      const Value* const found = value_.find(term.text);
      return found == nullptr || value(formulas_.of(*term.schema, term.inner), *found);
    }
    case Atom::members:
      return std::all_of(members.begin(), members.end(), [&](const Value& each) {
        const auto listed = term.schema->properties.find(each.key());
        if (listed != term.schema->properties.end() && !is_valid(*listed->second, true, each))
          return false;
        const std::vector<const Value*> others = unlisted(*term.schema, each.key());
        return std::all_of(others.begin(), others.end(),
                           [&](const Value* schema) { return is_valid(*schema, true, each); });
      });
    case Atom::names:
      return std::all_of(members.begin(), members.end(), [&](const Value& each) {
        return text(formulas_.of(document.schema(*(*term.schema)[Keyword::property_names]), true),
                    each.key());
      });
    case Atom::violates:
      // This atom is true if at least one property is certainly invalid (see formula.h).
      return std::any_of(members.begin(), members.end(), [&](const Value& each) {
        const std::vector<const Value*> others = unlisted(*term.schema, each.key());
        return std::any_of(others.begin(), others.end(),
                           [&](const Value* schema) { return is_valid(*schema, false, each); });
      });
    case Atom::unevaluated_properties:
      document.refuse(*term.schema, Keyword::unevaluated_properties,
                      "is not supported beside enum and const");
    default:
      return true;
  }
}

}  // namespace dlm::compile::schema
