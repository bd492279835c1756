// Builds formulas that combine atoms (conditions on a value) with "and" and "or". Simplifies each
// formula, and stores equal formulas only once. formula_of_schema.cc builds the formulas of a
// schema's keywords.
#include "compile/schema/formula.h"

#include <algorithm>

#include "compile/schema/layout.h"

namespace dlm::compile::schema {
namespace {

using json::Value;

std::string content_of(const Term& term) {
  std::string out;
  const auto put = [&](const auto& value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  put(term.op);
  if (term.op != Op::atom) {
    out.append(reinterpret_cast<const char*>(term.parts.data()),
               term.parts.size() * sizeof(Formula));
    return out;
  }
  put(term.atom), put(term.positive), put(term.inner), put(term.low), put(term.high);
  put(term.first), put(term.values);
  if (term.atom == Atom::type || term.atom == Atom::integer) put(term.kinds);
  if (has_inner_values(term.atom) || term.atom == Atom::rejected)
    put(term.schema), put(term.keyword);
  put(term.number.is_negative), put(term.number.is_plain), put(term.number.exponent),
      put(term.number.digits.size());
  return out + term.number.digits + term.text;
}

}  // namespace

bool has_inner_values(Atom atom) {
  switch (atom) {
    case Atom::items:
    case Atom::item:
    case Atom::matches:
    case Atom::members:
    case Atom::member:
    case Atom::violates:
    case Atom::names:
    case Atom::unevaluated_items:
    case Atom::unevaluated_properties:
      return true;
    default:
      return false;
  }
}

Formulas::Formulas(Document& document, Recursion& recursion, Budget& budget)
    : document_(document), recursion_(recursion), budget_(budget) {
  for (const Op op : {Op::no, Op::yes}) {
    Term term;
    term.op = op;
    if (op == Op::no) term.kinds = 0, term.is_typed = true;
    add(std::move(term));
  }
}

Formula Formulas::add(Term term) {
  budget_.check();
  std::string content = content_of(term);
  const auto [at, is_new] =
      by_content_.emplace(std::move(content), static_cast<Formula>(terms_.size()));
  if (is_new) {
    bytes_ += sizeof(Term) + 2 * at->first.size() + 128;
    budget_.check_memory(bytes_);
    terms_.push_back(std::move(term));
  }
  return at->second;
}

uint8_t Formulas::kinds_of(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::null:
      return kNull;
    case Value::Kind::boolean:
      return kBoolean;
    case Value::Kind::number: {
      const bool is_plain = value.written().find_first_of(".eE") == std::string::npos;
      if (is_plain) return kInteger;
      return Decimal::parse(value.written()).is_integer() ? kNumber : kFraction;
    }
    case Value::Kind::string:
      return kString;
    case Value::Kind::array:
      return kArray;
    case Value::Kind::object:
      return kObject;
  }
  return 0;
}

// ---- Atoms

Formula Formulas::type(uint8_t kinds, bool is_draft_4) {
  if (kinds == 0) return kNo;
  if (kinds == kAllKinds) return kYes;
  Term term;
  term.atom = Atom::type, term.kinds = kinds, term.is_typed = true, term.low = is_draft_4 ? 1 : 0;
  return add(std::move(term));
}

Formula Formulas::atom(Atom kind, const Schema& schema, uint8_t speaks_of, Term made) {
  made.atom = kind, made.schema = &schema, made.speaks_of = speaks_of;
  return add(std::move(made));
}

Formula Formulas::has(const std::string& name, bool positive, const Schema* schema) {
  Term term;
  term.atom = Atom::has, term.text = name, term.positive = positive, term.schema = schema;
  term.speaks_of = kObject;
  return add(std::move(term));
}

Formula Formulas::member(const std::string& name, const Schema& schema) {
  Term term;
  term.text = name, term.inner = false;
  return atom(Atom::member, schema, kObject, std::move(term));
}

Formula Formulas::values(const Schema& schema, Keyword keyword, bool positive) {
  std::vector<const Value*> found;
  if (keyword == Keyword::const_) {
    found.push_back(schema[keyword]);
  } else {
    for (const Value& each : schema[keyword]->elements()) found.push_back(&each);
  }
  return values(std::move(found), &schema, positive);
}

Formula Formulas::values(std::vector<const Value*> found, const Schema* schema, bool positive) {
  if (!positive) {
    const auto containers =
        std::stable_partition(found.begin(), found.end(), [](const Value* value) {
          return value->kind() != Value::Kind::array && value->kind() != Value::Kind::object;
        });
    if (containers != found.end()) {
      std::vector<Formula> parts;
      for (auto at = containers; at != found.end(); ++at) parts.push_back(differs(**at, *schema));
      found.erase(containers, found.end());
      parts.push_back(values(std::move(found), schema, false));
      return all(parts);
    }
  }
  ValueSet set;
  std::string content;
  for (const Value* const value : found) {
    budget_.check();
    std::string key = key_of(*value);
    if (!set.lookup.insert(key).second) continue;
    // Equal values such as 1 and 1.0 have the same key, but different texts. So `content` contains
    // the address of the value instead of its key.
    content.append(reinterpret_cast<const char*>(&value), sizeof value);
    set.values.push_back(value);
    set.keys.push_back(std::move(key));
    set.kinds = static_cast<uint8_t>(set.kinds | kinds_of(*value));
  }
  if (set.values.empty()) return positive ? kNo : kYes;
  const auto [at, is_new] = sets_by_content_.emplace(std::move(content), nullptr);
  if (is_new) {
    bytes_ += 256 * set.values.size();
    budget_.check_memory(bytes_);
    sets_.push_back(std::move(set));
    at->second = &sets_.back();
  }
  Term term;
  term.atom = Atom::values, term.positive = positive, term.values = at->second;
  term.schema = schema;
  if (positive) term.is_typed = true, term.kinds = at->second->kinds;
  return add(std::move(term));
}

// Returns a formula that is true for all values except `value`, which is an array or object. The
// formula says that the type, the size or the content of the value is different.
Formula Formulas::differs(const Value& value, const Schema& schema) {
  budget_.check();
  const bool is_array = value.kind() == Value::Kind::array;
  const uint8_t kind = is_array ? kArray : kObject;
  const std::vector<Value>& inner = is_array ? value.elements() : value.members();
  std::vector<Formula> ways, names;
  for (size_t i = 0; i < inner.size(); ++i) {
    if (is_array) {
      Term term;
      term.low = i, term.inner = false;
      ways.push_back(all({range(Atom::item_count, schema, kArray, i + 1, kNoLimit, true),
                          atom(Atom::item, constant(inner[i], schema), kArray, std::move(term))}));
    } else {
      const std::string& name = inner[i].key();
      names.push_back(has(name, true, &schema));
      ways.push_back(has(name, false, &schema));
      ways.push_back(all({names.back(), member(name, constant(inner[i], schema))}));
    }
  }
  if (is_array) {
    ways.push_back(range(Atom::item_count, schema, kArray, inner.size(), inner.size(), false));
    // An object is also different if it has all properties of `value` and at least one more
    // property.
  } else {
    names.push_back(range(Atom::property_count, schema, kObject, 0, inner.size(), false));
    ways.push_back(all(names));
  }
  return any({type(static_cast<uint8_t>(kAllKinds & ~kind)), all({type(kind), any(ways)})});
}

// Returns a schema that allows only `value`, a value of the enum or const of `schema`. Error
// messages about the returned schema contain the position of `schema`.
const Schema& Formulas::constant(const Value& value, const Schema& schema) {
  const auto [at, is_new] = constants_.try_emplace(&value);
  if (is_new) {
    bytes_ += sizeof(Schema);
    budget_.check_memory(bytes_);
    at->second.value = schema.value, at->second.resource = schema.resource;
    at->second.keywords[static_cast<size_t>(Keyword::const_)] = &value;
  }
  return at->second;
}

Formula Formulas::rejected(const Schema& schema, Keyword keyword, uint8_t type_) {
  Term term;
  term.keyword = keyword;
  return all({type(type_), atom(Atom::rejected, schema, type_, std::move(term))});
}

uint64_t Formulas::count(const Schema& schema, Keyword keyword, uint64_t otherwise) {
  constexpr uint64_t kMost = 1'000'000'000'000;
  if (schema[keyword] == nullptr) return otherwise;
  const auto found = Decimal::parse(schema[keyword]->written()).integer(12);
  return found.has_value() ? static_cast<uint64_t>(*found) : kMost;
}

// Returns a formula that is true if a count is at least `low` and at most `high`. If `positive` is
// false, returns the negation of this formula. `kind` selects the count, for example the number of
// items. The count exists only for values of the type `type_`, for example arrays.
Formula Formulas::range(Atom kind, const Schema& schema, uint8_t type_, uint64_t low, uint64_t high,
                        bool positive) {
  const auto within = [&](uint64_t from, uint64_t to) {
    Term term;
    term.low = from, term.high = to;
    return atom(kind, schema, type_, std::move(term));
  };
  if (positive) return within(low, high);
  std::vector<Formula> outside;
  if (low > 0) outside.push_back(within(0, low - 1));
  if (high != kNoLimit) outside.push_back(within(high + 1, kNoLimit));
  return all({type(type_), any(outside)});
}

// ---- Connectives

Formula Formulas::all(const std::vector<Formula>& parts) {
  Term made;
  made.op = Op::all;
  std::unordered_set<Formula> seen;
  std::unordered_map<std::string_view, bool> properties;
  std::vector<Formula> lists, queue(parts.rbegin(), parts.rend());
  uint8_t types = kAllKinds;
  bool is_draft_4 = false;
  size_t type_at = SIZE_MAX, listed_at = SIZE_MAX;
  while (!queue.empty()) {
    budget_.check();
    const Formula part = queue.back();
    queue.pop_back();
    const Term& term = terms_[part];
    if (term.op == Op::all) {
      queue.insert(queue.end(), term.parts.rbegin(), term.parts.rend());
      continue;
    }
    if (part == kNo) return kNo;
    if (part == kYes || !seen.insert(part).second) continue;
    made.kinds = static_cast<uint8_t>(made.kinds & term.kinds);
    made.speaks_of = static_cast<uint8_t>(made.speaks_of | term.speaks_of);
    made.is_typed |= term.is_typed;
    if (term.op == Op::atom && term.atom == Atom::type) {
      types = static_cast<uint8_t>(types & term.kinds);
      is_draft_4 |= term.low != 0;
      if (type_at != SIZE_MAX) continue;
      type_at = made.parts.size();
    } else if (term.op == Op::atom && term.atom == Atom::values) {
      lists.push_back(part);
      if (!term.positive || listed_at != SIZE_MAX) continue;
      listed_at = made.parts.size();
    } else if (term.op == Op::atom && term.atom == Atom::has) {
      const auto [at, is_new] = properties.emplace(term.text, term.positive);
      if (!is_new && at->second != term.positive) return kNo;
    }
    made.parts.push_back(part);
  }
  if (made.kinds == 0) return kNo;
  if (type_at != SIZE_MAX) made.parts[type_at] = type(types, is_draft_4);
  if (listed_at == SIZE_MAX) {
    made.parts.insert(made.parts.end(), lists.begin(), lists.end());
  } else {
    Formula fewest = kYes;
    for (const Formula each : lists) {
      const Term& term = terms_[each];
      if (term.positive &&
          (fewest == kYes || term.values->values.size() < terms_[fewest].values->values.size()))
        fewest = each;
    }
    const ValueSet& set = *terms_[fewest].values;
    std::vector<const Value*> kept;
    for (size_t i = 0; i < set.values.size(); ++i) {
      bool is_kept = (kinds_of(*set.values[i]) & made.kinds) != 0;
      for (const Formula each : lists) {
        budget_.check();
        const Term& term = terms_[each];
        is_kept = is_kept && term.values->lookup.count(set.keys[i]) == (term.positive ? 1 : 0);
      }
      if (is_kept) kept.push_back(set.values[i]);
    }
    const bool are_all = kept.size() == set.values.size();
    const Formula found = are_all ? fewest : values(std::move(kept), terms_[fewest].schema, true);
    if (found == kNo) return kNo;
    made.parts[listed_at] = found;
    made.kinds = static_cast<uint8_t>(made.kinds & terms_[found].kinds);
  }
  if (made.kinds == 0) return kNo;
  if (made.parts.empty()) return kYes;
  return made.parts.size() == 1 ? made.parts[0] : add(std::move(made));
}

Formula Formulas::any(const std::vector<Formula>& parts) {
  Term made;
  made.op = Op::any, made.kinds = 0, made.is_typed = true;
  std::unordered_set<Formula> seen;
  std::vector<Formula> queue(parts.rbegin(), parts.rend());
  std::vector<const Value*> listed;
  size_t listed_at = SIZE_MAX, lists = 0;
  const Schema* schema = nullptr;
  while (!queue.empty()) {
    budget_.check();
    const Formula part = queue.back();
    queue.pop_back();
    const Term& term = terms_[part];
    if (term.op == Op::any) {
      queue.insert(queue.end(), term.parts.rbegin(), term.parts.rend());
      continue;
    }
    if (part == kYes) return kYes;
    if (part == kNo || !seen.insert(part).second) continue;
    made.kinds = static_cast<uint8_t>(made.kinds | term.kinds);
    made.speaks_of = static_cast<uint8_t>(made.speaks_of | term.speaks_of);
    made.is_typed &= term.is_typed;
    if (term.op == Op::atom && term.atom == Atom::values && term.positive) {
      listed.insert(listed.end(), term.values->values.begin(), term.values->values.end());
      if (schema == nullptr) schema = term.schema;
      ++lists;
      if (listed_at != SIZE_MAX) continue;
      listed_at = made.parts.size();
    }
    made.parts.push_back(part);
  }
  if (lists > 1) made.parts[listed_at] = values(std::move(listed), schema, true);
  if (made.parts.empty()) return kNo;
  return made.parts.size() == 1 ? made.parts[0] : add(std::move(made));
}

// Returns a formula that is true if exactly one branch is true. `pairs` contains the branches. Each
// branch is followed by its negation.
Formula Formulas::one(const std::vector<Formula>& pairs) {
  Term made;
  made.op = Op::one, made.kinds = 0, made.is_typed = true;
  // Additional conditions. They must be true in addition to the condition that exactly one of the
  // other branches is true.
  std::vector<Formula> others;
  Formula always = kNo;
  size_t always_true = 0;
  for (size_t i = 0; i < pairs.size(); i += 2) {
    const Formula branch = pairs[i], negation = pairs[i + 1];
    if (negation == kNo) {
      ++always_true;
      always = branch;
    } else if (branch == kNo) {
      others.push_back(negation);
    } else {
      const Term& term = terms_[branch];
      made.kinds = static_cast<uint8_t>(made.kinds | term.kinds);
      made.speaks_of = static_cast<uint8_t>(made.speaks_of | term.speaks_of);
      made.is_typed &= term.is_typed;
      made.parts.push_back(branch), made.parts.push_back(negation);
    }
  }
  if (always_true > 1) return kNo;
  if (always_true == 1) {
    others.push_back(always);
    for (size_t i = 1; i < made.parts.size(); i += 2) others.push_back(made.parts[i]);
    return all(others);
  }
  if (made.parts.empty()) return kNo;
  others.push_back(made.parts.size() == 2 ? made.parts[0] : add(std::move(made)));
  return all(others);
}

// Returns a formula that is true if at least two of the branches with the indices `from` to `to` -
// 1 are true.
Formula Formulas::several(const std::vector<Formula>& branches, size_t from, size_t to) {
  if (to - from < 2) return kNo;
  const size_t middle = from + (to - from) / 2;
  const auto at = [&](size_t index) { return branches.begin() + static_cast<ptrdiff_t>(index); };
  return any({several(branches, from, middle), several(branches, middle, to),
              all({any({at(from), at(middle)}), any({at(middle), at(to)})})});
}

std::vector<Formula> Formulas::conjuncts(Formula formula) const {
  if (formula == kYes) return {};
  return terms_[formula].op == Op::all ? terms_[formula].parts : std::vector<Formula>{formula};
}

}  // namespace dlm::compile::schema
