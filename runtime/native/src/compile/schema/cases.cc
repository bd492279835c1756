// Splits the formula of an array or object into cases. writer.h explains what a case is.
#include <algorithm>

#include "compile/schema/writer.h"

namespace dlm::compile::schema {
namespace {

constexpr size_t kMostCases = 4096;  // largest number of cases of one array or object
constexpr size_t kMostCasesInAll = 50'000;
// The largest number of clauses of one choice or one object. clauses_of() explains clauses.
constexpr size_t kMostClauses = 64;

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

// Adds formulas to a case as new requirements. Ignores formulas that the case already requires. A
// choice is a formula with alternatives, as for anyOf.
void Writer::assert_all(Case& found, std::vector<Formula> todo) {
  std::reverse(todo.begin(), todo.end());
  while (!todo.empty() && !found.is_dead) {
    expressions_.budget().check();
    const Formula formula = todo.back();
    todo.pop_back();
    if (formula == Formulas::kYes || !found.asserted.insert(formula).second) continue;
    const Term& term = formulas_[formula];
    if (term.op == Op::no) {
      found.is_dead = true;
    } else if (term.op == Op::all) {
      todo.insert(todo.end(), term.parts.rbegin(), term.parts.rend());
    } else if (term.op != Op::atom) {
      found.choices.push_back(formula);
    } else {
      if (term.atom == Atom::rejected)
        document_.refuse(*term.schema, term.keyword, "is not supported within a negation");
      if (term.atom == Atom::has) {
        const auto [at, is_new] = found.has.emplace(term.text, term.positive);
        if (!is_new && at->second != term.positive) found.is_dead = true;
      }
      found.atoms.push_back(formula);
    }
  }
}

// Simplifies a formula, using the formulas that the case already requires. If `names` is not null,
// assumes that the object has no other properties than the properties in `names`.
Formula Writer::reduced(Formula formula, const Case& found, const std::vector<std::string>* names) {
  expressions_.budget().check();
  if (found.asserted.count(formula) != 0) return Formulas::kYes;
  const Term& term = formulas_[formula];
  switch (term.op) {
    case Op::no:
    case Op::yes:
      return formula;
    case Op::all:
    case Op::any:
    case Op::one: {
      std::vector<Formula> parts;
      const std::vector<Formula>& inner =
          term.op == Op::all ? term.parts : formulas_.alternatives(formula);
      for (const Formula part : inner) {
        const Formula each = reduced(part, found, names);
        if (each == (term.op == Op::all ? Formulas::kNo : Formulas::kYes)) return each;
        parts.push_back(each);
      }
      return term.op == Op::all ? formulas_.all(parts) : formulas_.any(parts);
    }
    case Op::atom:
      break;
  }
  if (term.atom == Atom::has) {
    const auto known = found.has.find(term.text);
    if (known != found.has.end())
      return known->second == term.positive ? Formulas::kYes : Formulas::kNo;
    if (names != nullptr && !contains(*names, term.text))
      return term.positive ? Formulas::kNo : Formulas::kYes;
  }
  if (term.atom == Atom::member && names != nullptr && !contains(*names, term.text))
    return Formulas::kYes;
  if (term.atom == Atom::violates && names != nullptr)
    return reduced(violation(term, *names), found, names);
  return formula;
}

// Returns a formula that is true if at least one property in `names` violates patternProperties or
// additionalProperties.
Formula Writer::violation(const Term& term, const std::vector<std::string>& names) {
  const Schema& schema = *term.schema;
  std::vector<Formula> ways;
  for (const std::string& name : names) {
    for (const json::Value* const value : holds_.unlisted(schema, name))
      ways.push_back(formulas_.all(
          {formulas_.has(name, true, &schema), formulas_.member(name, document_.schema(*value))}));
  }
  return formulas_.any(ways);
}

// Does the same as reduced(), but for a choice that the case requires. reduced() returns kYes for
// every formula that the case requires.
Formula Writer::reduced_choice(Formula choice, const Case& found,
                               const std::vector<std::string>& names) {
  std::vector<Formula> ways;
  for (const Formula way : formulas_.alternatives(choice))
    ways.push_back(reduced(way, found, &names));
  return formulas_.any(ways);
}

// Removes the decided choices from a case. A choice is decided if it is certainly true, or if only
// one of its alternatives is still possible. Returns true if the case has changed.
bool Writer::propagate(Case& found) {
  std::vector<Formula> choices;
  choices.swap(found.choices);
  bool is_changed = false;
  for (size_t i = 0; i < choices.size(); ++i) {
    std::vector<Formula> left;
    bool is_true = false;
    const std::vector<Formula> ways = formulas_.alternatives(choices[i]);
    for (const Formula way : ways) {
      const Formula rest = reduced(way, found, nullptr);
      if (rest == Formulas::kYes) is_true = true;
      if (rest != Formulas::kNo) left.push_back(way);
    }
    // Removes a decided choice from the requirements of the case. If only this choice names a
    // property, the writer then treats the property as if the schema did not name it.
    if (is_true || left.size() <= 1) found.asserted.erase(choices[i]);
    if (is_true) {
      is_changed = true;
    } else if (left.size() <= 1) {
      is_changed = true;
      assert_all(found, left.empty() ? std::vector<Formula>{Formulas::kNo} : left);
      if (found.is_dead) return false;
    } else {
      found.choices.push_back(left.size() == ways.size() ? choices[i] : formulas_.any(left));
    }
  }
  return is_changed;
}

// Returns true if a branch of a choice constrains the content of an array or object. The writer
// must split a case with such a choice before it can build the texts of the case. If `with_names`
// is true, also returns true if the branch requires a property that is not in `names`.
bool Writer::adds_structure(Formula formula, const std::vector<std::string>& names,
                            bool with_names) {
  expressions_.budget().check();
  const Term& term = formulas_[formula];
  if (term.op != Op::atom) {
    const std::vector<Formula> parts =
        term.op == Op::one ? formulas_.alternatives(formula) : term.parts;
    return std::any_of(parts.begin(), parts.end(),
                       [&](Formula part) { return adds_structure(part, names, with_names); });
  }
  switch (term.atom) {
    case Atom::enter:
    case Atom::members:
    case Atom::values:
    case Atom::unevaluated_properties:
      return true;
    case Atom::has:
      return with_names && term.positive && !contains(names, term.text);
    default:
      return false;
  }
}

// Converts a choice to clauses, and appends the clauses to `out`. A clause is a list of conditions,
// and at least one of them must be true. Each condition says that a property is present, or that it
// is absent. Returns false if there are too many clauses, or if the choice contains conditions
// other than the presence or absence of properties in `names`.
bool Writer::clauses_of(Formula choice, const std::vector<std::string>& names,
                        std::vector<Clause>& out) {
  std::vector<Clause> made = {{}};
  const std::vector<Formula> ways = formulas_.alternatives(choice);
  for (const Formula way : ways) {
    std::vector<Clause> longer;
    for (const Formula part : formulas_.conjuncts(way)) {
      const Term& term = formulas_[part];
      if (term.op != Op::atom || term.atom != Atom::has) return false;
      const auto at = std::find(names.begin(), names.end(), term.text);
      if (at == names.end()) return false;
      for (const Clause& clause : made) {
        if (longer.size() > kMostClauses) return false;
        longer.push_back(clause);
        longer.back().push_back({static_cast<size_t>(at - names.begin()), term.positive});
      }
    }
    made.swap(longer);
  }
  out.insert(out.end(), made.begin(), made.end());
  return out.size() <= kMostClauses;
}

// Returns the names of the properties to write. The names in the keyword `properties` come first,
// in the order of the keyword. Required names that are not in `properties` follow.
std::vector<std::string> Writer::names_of(const Case& found) {
  std::vector<std::string> names;
  std::unordered_set<std::string_view> seen;
  const auto add = [&](const std::string& name) {
    if (seen.insert(name).second) names.push_back(name);
  };
  for (const Formula part : found.atoms) {
    const Term& term = formulas_[part];
    if (term.atom != Atom::members) continue;
    if (const json::Value* const properties = (*term.schema)[Keyword::properties]) {
      for (const json::Value& each : properties->members()) {
        expressions_.budget().check();
        add(each.key());
      }
    }
  }
  for (const Formula part : found.atoms) {
    const Term& term = formulas_[part];
    if (term.atom == Atom::has && term.positive) add(term.text);
  }
  return names;
}

Writer::Made Writer::container_values(Formula formula, uint8_t type, const Place& place) {
  std::vector<Made> out;
  std::vector<Case> open(1);
  assert_all(open[0], {formula});
  size_t count = 0;
  while (!open.empty()) {
    Case found = std::move(open.back());
    open.pop_back();
    while (!found.is_dead && propagate(found)) {
    }
    if (found.is_dead) continue;
    if (++count > kMostCases || ++cases_ > kMostCasesInAll)
      throw Error(DLM_INVALID_ARGUMENT,
                  "schema: its anyOf, oneOf, if and not have too many combinations: make it "
                  "smaller");
    const std::vector<std::string> names =
        type == kObject ? names_of(found) : std::vector<std::string>();
    const std::optional<size_t> choice = next_choice(found, type, names);
    if (choice.has_value()) {
      const Formula formula = found.choices[*choice];
      found.asserted.erase(formula);
      split(std::move(found), *choice, formulas_.alternatives(formula), open);
      continue;
    }
    if (found.is_dead) continue;
    if (type == kObject && expand_violation(found, names, open)) continue;
    if (!found.choices.empty() && formulas_.listed(formulas_.all(found.atoms)) == nullptr) {
      // At this line, each remaining choice is either certainly true, or only about the presence of
      // properties.
      std::vector<Clause> clauses;
      bool is_changed = false;
      std::optional<size_t> other;
      std::vector<Formula> certain;
      for (size_t i = 0; i < found.choices.size() && !other.has_value(); ++i) {
        const Formula rest = reduced_choice(found.choices[i], found, names);
        if (rest == Formulas::kYes) {
          // Adds the first alternative that is certainly true if the object has only properties in
          // `names`.
          for (const Formula way : formulas_.alternatives(found.choices[i])) {
            if (reduced(way, found, &names) != Formulas::kYes) continue;
            certain.push_back(way);
            break;
          }
          is_changed = true;
        } else if (rest == Formulas::kNo) {
          other = i;
        } else if (formulas_[rest].op != Op::any || !clauses_of(rest, names, clauses)) {
          other = i;
        }
      }
      if (other.has_value()) {
        split_with_names(found, *other, names, open);
        continue;
      }
      if (is_changed) {
        // Requires the alternatives in `certain`, and processes the case again. This removes the
        // choices that are now decided.
        assert_all(found, certain);
        open.push_back(std::move(found));
        continue;
      }
      out.push_back(object(found, names, clauses, place));
      continue;
    }
    if (const ValueSet* const set = formulas_.listed(formulas_.all(found.atoms))) {
      out.push_back(listed_values(found, *set, place));
    } else {
      out.push_back(type == kObject ? object(found, names, {}, place) : array(found, place));
    }
  }
  return either(out);
}

// Returns the index of the choice by which the writer must split the case next. Returns nullopt if
// the case need not be split.
std::optional<size_t> Writer::next_choice(const Case& found, uint8_t type,
                                          const std::vector<std::string>& names) {
  if (formulas_.listed(formulas_.all(found.atoms)) != nullptr) return std::nullopt;
  for (size_t i = 0; i < found.choices.size(); ++i)
    if (type == kArray || adds_structure(found.choices[i], names, false)) return i;
  for (size_t i = 0; i < found.choices.size(); ++i)
    if (adds_structure(found.choices[i], names, true) &&
        reduced_choice(found.choices[i], found, names) != Formulas::kYes)
      return i;
  return std::nullopt;
}

// A case may require that some property violates patternProperties or additionalProperties. This
// function replaces the requirement by a choice with one alternative for each property in `names`,
// and returns true. Returns false if the case contains no such requirement, or if the case lists
// all its possible values.
bool Writer::expand_violation(Case& found, const std::vector<std::string>& names,
                              std::vector<Case>& open) {
  const auto at = std::find_if(found.atoms.begin(), found.atoms.end(), [&](Formula part) {
    return formulas_[part].op == Op::atom && formulas_[part].atom == Atom::violates;
  });
  if (at == found.atoms.end() || formulas_.listed(formulas_.all(found.atoms)) != nullptr)
    return false;
  const Formula asserted = *at;
  const Formula rest = violation(formulas_[asserted], names);
  if (rest == Formulas::kNo) {
    if (names.empty()) refuse_violation(asserted);
    return true;
  }
  found.atoms.erase(at);
  found.asserted.erase(asserted);
  assert_all(found, {rest});
  if (!found.is_dead) open.push_back(std::move(found));
  return true;
}

// Adds one case to `open` for each alternative in `ways`, which replaces a choice of the case.
void Writer::split(Case found, size_t choice, std::vector<Formula> ways, std::vector<Case>& open) {
  found.choices.erase(found.choices.begin() + static_cast<ptrdiff_t>(choice));
  // `open` is a stack, so the loop pushes the alternatives in reverse order.
  for (size_t i = ways.size(); i-- > 0;) {
    expressions_.budget().check();
    Case made = found;
    assert_all(made, {ways[i]});
    if (!made.is_dead) open.push_back(std::move(made));
  }
}

// Does the same as split(), but assumes that only the properties in `names` are written. Splits the
// case only by the alternatives that are possible with these properties. Call this function if
// clauses_of() cannot convert the choice to clauses.
void Writer::split_with_names(const Case& found, size_t choice,
                              const std::vector<std::string>& names, std::vector<Case>& open) {
  const Formula rest = reduced_choice(found.choices[choice], found, names);
  if (rest == Formulas::kNo) {
    if (names.empty()) {
      for (const Formula way : formulas_.alternatives(found.choices[choice])) refuse_violation(way);
    }
    return;
  }
  const Op op = formulas_[rest].op;
  split(found, choice,
        op == Op::any || op == Op::one ? formulas_.alternatives(rest) : std::vector<Formula>{rest},
        open);
}

void Writer::refuse_violation(Formula formula) {
  for (const Formula part : formulas_.conjuncts(formula)) {
    const Term& term = formulas_[part];
    if (term.op == Op::atom && term.atom == Atom::violates)
      document_.refuse(*term.schema,
                       (*term.schema)[Keyword::additional_properties] != nullptr
                           ? Keyword::additional_properties
                           : Keyword::pattern_properties,
                       "within a negation is not supported without properties beside it");
  }
}

Writer::Place Writer::inside(const Case& found, const Place& place) const {
  Place made{place.level + 1, place.counts};
  for (const Formula part : found.atoms) {
    const Term& term = formulas_[part];
    if (term.atom != Atom::enter) continue;
    const auto number = static_cast<uint32_t>(term.low);
    const auto at = std::lower_bound(made.counts.begin(), made.counts.end(), std::pair{number, 0u});
    if (at != made.counts.end() && at->first == number) {
      ++at->second;
    } else {
      made.counts.insert(at, {number, 1});
    }
  }
  return made;
}

Writer::Made Writer::listed_values(const Case& found, const ValueSet& values, const Place& place) {
  std::vector<Node> nodes;
  double size = 0;
  for (const json::Value* const value : values.values) {
    const auto holds = [&](Formula part) { return holds_.value(part, *value); };
    if (!std::all_of(found.atoms.begin(), found.atoms.end(), holds) ||
        !std::all_of(found.choices.begin(), found.choices.end(), holds))
      continue;
    const std::string text = text_of(*value, options_.layout, place.level);
    nodes.push_back(expressions_.bytes(text));
    size += static_cast<double>(text.size());
  }
  return {expressions_.either(std::move(nodes)), size};
}

// Returns true if a formula is certainly true in a case. Otherwise returns false. The function may
// also return false for a formula that is always true.
bool Writer::is_asserted(Formula formula, const Case& found, uint8_t type) {
  for (const Formula part : formulas_.conjuncts(formulas_.restricted(formula, type))) {
    if (found.asserted.count(part) != 0) continue;
    const Term& term = formulas_[part];
    if (term.op != Op::any || std::none_of(term.parts.begin(), term.parts.end(), [&](Formula each) {
          return is_asserted(each, found, type);
        }))
      return false;
  }
  return true;
}

}  // namespace dlm::compile::schema
