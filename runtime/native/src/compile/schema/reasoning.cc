// Derives facts from formulas alone, without trying values. The functions simplify a formula for
// one type of values, find branches that exclude each other, and remove references that are nested
// too deeply.
#include <algorithm>

#include "compile/schema/formula.h"

namespace dlm::compile::schema {
namespace {

using Counts = std::vector<std::pair<uint32_t, uint32_t>>;

uint32_t count_of(const Counts& counts, uint32_t number) {
  const auto found = std::lower_bound(counts.begin(), counts.end(), std::pair{number, 0u});
  return found != counts.end() && found->first == number ? found->second : 0;
}

}  // namespace

Formula Formulas::restricted(Formula formula, uint8_t type_) {
  if (formula == kNo || formula == kYes) return formula;
  const uint64_t key = uint64_t{formula} << 8 | type_;
  const auto found = restricted_.find(key);
  if (found != restricted_.end()) return found->second;
  budget_.check();
  const Term& term = terms_[formula];
  Formula made = kYes;
  if (term.op != Op::atom) {
    std::vector<Formula> parts;
    for (const Formula part : term.parts) parts.push_back(restricted(part, type_));
    made = term.op == Op::all ? all(parts) : term.op == Op::any ? any(parts) : one(parts);
  } else if (term.atom == Atom::enter) {
    made = (type_ & (kArray | kObject)) != 0 ? formula : kYes;
  } else if (term.atom == Atom::type) {
    const auto common = static_cast<uint8_t>(term.kinds & type_);
    if (common == 0) {
      made = kNo;
    } else if (common != type_) {
      Term integer;
      integer.atom = Atom::integer, integer.positive = common == kInteger, integer.low = term.low;
      integer.kinds = common, integer.speaks_of = kNumber;
      made = add(std::move(integer));
    }
  } else if (term.atom == Atom::values) {
    std::vector<const json::Value*> kept;
    for (const json::Value* const value : term.values->values)
      if ((kinds_of(*value) & type_) != 0) kept.push_back(value);
    made = kept.size() == term.values->values.size()
               ? formula
               : values(std::move(kept), term.schema, term.positive);
  } else if ((term.speaks_of & type_) != 0) {
    made = formula;
  }
  return restricted_[key] = made;
}

const std::vector<Formula>& Formulas::alternatives(Formula formula) {
  const Term& term = terms_[formula];
  if (term.op == Op::any) return term.parts;
  const auto [at, is_new] = alternatives_.try_emplace(formula);
  if (!is_new) return at->second;
  const std::vector<Formula>& pairs = term.parts;
  const bool are_apart = are_told_apart(pairs);
  std::vector<Formula> made;
  for (size_t i = 0; i < pairs.size(); i += 2) {
    std::vector<Formula> parts = {pairs[i]};
    for (size_t j = 1; j < pairs.size() && !are_apart; j += 2) {
      budget_.check();
      if (j != i + 1 && !implies(pairs[i], pairs[j])) parts.push_back(pairs[j]);
    }
    const Formula found = all(parts);
    if (found != kNo) made.push_back(found);
  }
  return alternatives_[formula] = std::move(made);
}

Formula Formulas::entered(Formula formula, const Counts& counts, uint32_t max_depth) {
  std::vector<uint32_t> too_deep;
  for (const uint32_t number : numbers(formula))
    if (count_of(counts, number) > max_depth) too_deep.push_back(number);
  if (too_deep.empty()) return formula;
  std::unordered_map<Formula, Formula> made;
  const auto replaced = [&](const auto& self, Formula part) -> Formula {
    const auto known = made.find(part);
    if (known != made.end()) return known->second;
    budget_.check();
    const Term& term = terms_[part];
    Formula result = part;
    if (term.op == Op::atom) {
      if (term.atom == Atom::enter &&
          std::binary_search(too_deep.begin(), too_deep.end(), static_cast<uint32_t>(term.low)))
        result = kNo;
    } else if (term.op != Op::no && term.op != Op::yes) {
      std::vector<Formula> parts;
      for (const Formula each : term.parts) parts.push_back(self(self, each));
      result = term.op == Op::all ? all(parts) : term.op == Op::any ? any(parts) : one(parts);
    }
    return made[part] = result;
  };
  return replaced(replaced, formula);
}

const std::vector<uint32_t>& Formulas::numbers(Formula formula) {
  const auto found = numbers_.find(formula);
  if (found != numbers_.end()) return found->second;
  budget_.check();
  const Term& term = terms_[formula];
  std::vector<uint32_t> made;
  if (term.op != Op::atom) {
    for (const Formula part : term.parts) unite(made, numbers(part));
  } else if (term.atom == Atom::enter) {
    made = {static_cast<uint32_t>(term.low)};
  } else if (has_inner_values(term.atom)) {
    made = recursion_.below(*term.schema->value);
  }
  return numbers_[formula] = std::move(made);
}

// ---- Branches that exclude each other

Formula Formulas::property(Formula formula, const std::string& name) {
  std::vector<Formula> parts;
  for (const Formula part : conjuncts(formula)) {
    const Term& term = terms_[part];
    if (term.op != Op::atom) continue;
    if (term.atom == Atom::member && term.text == name) {
      parts.push_back(of(*term.schema, term.inner));
    } else if (term.atom == Atom::members) {
      const auto found = term.schema->properties.find(name);
      const json::Value* const others = (*term.schema)[Keyword::additional_properties];
      if (found != term.schema->properties.end()) {
        parts.push_back(of(document_.schema(*found->second), true));
      } else if (others != nullptr && (*term.schema)[Keyword::pattern_properties] == nullptr) {
        parts.push_back(of(document_.schema(*others), true));
      }
    }
  }
  return all(parts);
}

const ValueSet* Formulas::listed(Formula formula) const {
  const Term& term = terms_[formula];
  if (term.op == Op::atom)
    return term.atom == Atom::values && term.positive ? term.values : nullptr;
  if (term.op != Op::all) return nullptr;
  for (const Formula part : term.parts)
    if (const ValueSet* const found = terms_[part].op == Op::atom ? listed(part) : nullptr)
      return found;
  return nullptr;
}

bool Formulas::implies(Formula one_, Formula other, int depth) {
  if (other == kYes || one_ == kNo || one_ == other) return true;
  if (other == kNo || depth == 0) return false;
  budget_.check();
  const Term& wanted = terms_[other];
  if (wanted.op == Op::any)
    return std::any_of(wanted.parts.begin(), wanted.parts.end(),
                       [&](Formula part) { return implies(one_, part, depth); });
  if (wanted.op == Op::all)
    return std::all_of(wanted.parts.begin(), wanted.parts.end(),
                       [&](Formula part) { return implies(one_, part, depth); });
  if (wanted.op != Op::atom) return false;
  const uint8_t kinds = terms_[one_].kinds;
  if (wanted.atom == Atom::type) return (kinds & ~wanted.kinds) == 0;
  if (wanted.atom == Atom::values && !wanted.positive) {
    if ((kinds & wanted.values->kinds) == 0) return true;
    const ValueSet* const set = listed(one_);
    return set != nullptr && std::none_of(set->keys.begin(), set->keys.end(), [&](const auto& key) {
             budget_.check();
             return wanted.values->lookup.count(key) != 0;
           });
  }
  if (wanted.atom == Atom::member)
    return implies(property(one_, wanted.text), of(*wanted.schema, wanted.inner), depth - 1);
  for (const Formula part : conjuncts(one_)) {
    const Term& term = terms_[part];
    if (part == other) return true;
    if (term.op != Op::atom) continue;
    switch (wanted.atom) {
      case Atom::length:
      case Atom::item_count:
      case Atom::property_count:
        if (term.atom == wanted.atom && term.low >= wanted.low && term.high <= wanted.high)
          return true;
        break;
      case Atom::bound:
        if (term.atom == wanted.atom && term.high == wanted.high) {
          const int order = term.number.compare(wanted.number) * (term.high == 0 ? 1 : -1);
          if (order > 0 || (order == 0 && term.low >= wanted.low)) return true;
        }
        break;
      case Atom::violates:
        if (term.atom == Atom::has && term.positive) {
          const Schema& schema = *wanted.schema;
          const json::Value* const others = schema[Keyword::additional_properties];
          if (others != nullptr && others->kind() == json::Value::Kind::boolean &&
              !others->boolean() && schema[Keyword::pattern_properties] == nullptr &&
              schema.properties.count(term.text) == 0)
            return true;
        }
        break;
      default:
        break;
    }
  }
  return false;
}

// Returns a set of constants such that the formula is true for every value that is not in this set.
// If `within` is true, the set instead contains values of the property `name`. In this case, the
// formula is true for every object whose property `name` has a value that is not in the set. Sets
// *is_typed to true if the formula also requires that the value is an object. Returns nullptr if
// there is no such set.
const ValueSet* Formulas::unlisted(Formula formula, const std::string& name, bool within,
                                   bool* is_typed) {
  const Term& term = terms_[formula];
  if (term.op == Op::any) {
    for (const Formula part : term.parts)
      if (const ValueSet* const found = unlisted(part, name, within, is_typed)) return found;
    return nullptr;
  }
  if (term.op == Op::atom) {
    if (within && term.atom == Atom::member && term.text == name)
      return unlisted(of(*term.schema, term.inner), name, false, is_typed);
    return !within && term.atom == Atom::values && !term.positive ? term.values : nullptr;
  }
  if (term.op != Op::all || !within) return nullptr;
  const ValueSet* found = nullptr;
  for (const Formula part : term.parts) {
    const Term& each = terms_[part];
    if (each.op == Op::atom && each.atom == Atom::type && (each.kinds & kObject) != 0) {
      *is_typed = true;
      continue;
    }
    if (each.op == Op::atom && each.atom == Atom::has && each.positive && each.text == name)
      continue;
    const ValueSet* const set = found == nullptr ? unlisted(part, name, true, is_typed) : nullptr;
    if (set == nullptr) return nullptr;
    found = set;
  }
  return found;
}

// Returns true if at most one branch can be true, because each branch allows different constants.
// For example, the branches {"const": 1} and {"const": 2} exclude each other. The constants must be
// for the value itself, or for a property that all branches require. The function does not compare
// the branches in any other way. So its time is proportional to the number of branches.
bool Formulas::are_told_apart(const std::vector<Formula>& pairs) {
  std::vector<std::string> names;
  bool are_listed = listed(pairs[0]) != nullptr;
  for (const Formula part : conjuncts(pairs[0])) {
    const Term& term = terms_[part];
    if (term.op == Op::atom && term.atom == Atom::has && term.positive) names.push_back(term.text);
  }
  constexpr size_t kMostNames = 8;
  names.resize(std::min(names.size(), kMostNames));
  if (are_listed) names.insert(names.begin(), std::string());
  for (size_t number = 0; number < names.size(); ++number) {
    const bool within = !(are_listed && number == 0);
    const std::string& name = names[number];
    // Maps the key of each constant to the branch whose negation excludes this constant. The branch
    // is given as an index in `pairs`. If there are several such branches, the index is SIZE_MAX.
    std::unordered_map<std::string_view, size_t> owners;
    std::vector<const ValueSet*> sets;
    bool is_decided = true, are_objects = true, is_any_typed = false;
    for (size_t i = 0; i < pairs.size() && is_decided; i += 2) {
      budget_.check();
      bool is_typed = false;
      const ValueSet* const excluded = unlisted(pairs[i + 1], name, within, &is_typed);
      are_objects &= terms_[pairs[i]].kinds == kObject;
      is_any_typed |= is_typed;
      const ValueSet* const allowed = listed(within ? property(pairs[i], name) : pairs[i]);
      bool has_name = !within;
      for (const Formula part : within ? conjuncts(pairs[i]) : std::vector<Formula>()) {
        const Term& term = terms_[part];
        has_name |=
            term.op == Op::atom && term.atom == Atom::has && term.positive && term.text == name;
      }
      is_decided = excluded != nullptr && allowed != nullptr && has_name;
      sets.push_back(allowed);
      if (!is_decided) break;
      for (const std::string& key : excluded->keys) {
        const auto [at, is_new] = owners.emplace(key, i);
        if (!is_new && at->second != i) at->second = SIZE_MAX;
      }
    }
    is_decided = is_decided && (are_objects || !is_any_typed);
    for (size_t i = 0; i < sets.size() && is_decided; ++i) {
      for (const std::string& key : sets[i]->keys) {
        const auto owner = owners.find(key);
        is_decided = is_decided && (owner == owners.end() || owner->second == 2 * i);
      }
    }
    if (is_decided) return true;
  }
  return false;
}

}  // namespace dlm::compile::schema
