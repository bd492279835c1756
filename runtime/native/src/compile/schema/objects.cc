// Builds the regular language (set of texts) of the objects of one case. writer.h explains cases.
// The text of an object is a row of properties, in the order of the schema.
#include <algorithm>

#include "compile/schema/writer.h"

namespace dlm::compile::schema {
namespace {

using json::Value;

constexpr size_t kMostNameClasses = 64;  // largest number of classes of names in more_properties()

// The smallest number of states that a property needs in addition to the characters of its name.
// These states are for the quotes, the colon, the value and the comma.
constexpr size_t kStatesBesideName = 6;

}  // namespace

bool Writer::is_name_allowed(const Case& found, const std::string& name) {
  const auto known = found.has.find(name);
  if (known != found.has.end() && !known->second) return false;
  return std::all_of(found.atoms.begin(), found.atoms.end(), [&](Formula part) {
    const Term& term = formulas_[part];
    return term.atom != Atom::names ||
           holds_.text(
               formulas_.of(document_.schema(*(*term.schema)[Keyword::property_names]), true),
               name);
  });
}

// Returns true if a schema evaluates the property `name`. In the specification, a schema evaluates
// a property if a keyword such as `properties` applies to the property. If an inner schema
// evaluates a property, for example a schema in allOf, the outer schema evaluates the property too.
// The keyword unevaluatedProperties applies only to the properties that are not evaluated. `by` is
// the schema that contains this keyword.
//
// If `name` is null, the result applies to all properties of one class. `properties` does not list
// these properties, and their names match all of `patterns` and no other pattern.
bool Writer::is_evaluated(const Schema& schema, const Schema& by, const std::string* name,
                          const std::vector<const Value*>& patterns, const Case& found) {
  expressions_.budget().check();
  if (schema.is_boolean()) return false;
  if (schema[Keyword::additional_properties] != nullptr) return true;
  if (&schema != &by && schema[Keyword::unevaluated_properties] != nullptr) return true;
  if (name != nullptr && schema.properties.count(*name) != 0) return true;
  if (const Value* const own = schema[Keyword::pattern_properties]) {
    for (const Value& each : own->members()) {
      const bool matches =
          name != nullptr ? holds_.matches(each.key(), *name, schema)
                          : std::any_of(patterns.begin(), patterns.end(), [&](const Value* other) {
                              return other->key() == each.key();
                            });
      if (matches) return true;
    }
  }
  const auto is_by = [&](const Value& value) {
    return is_evaluated(document_.schema(value), by, name, patterns, found);
  };
  return any_applied(schema, found, kObject, is_by);
}

// Calls `test` for the inner schemas of `schema` that apply to the same value as `schema`, such as
// the schemas of allOf. Returns true if `test` returns true for one of them.
bool Writer::any_applied(const Schema& schema, const Case& found, uint8_t type,
                         const std::function<bool(const Value&)>& test) {
  for (const Keyword keyword : {Keyword::ref, Keyword::dynamic_ref, Keyword::recursive_ref}) {
    if (schema[keyword] != nullptr && test(*document_.target(schema, keyword).value)) return true;
  }
  const auto is_valid = [&](const Value& value, bool positive) {
    return is_asserted(formulas_.of(document_.schema(value), positive), found, type);
  };
  if (const Value* const all = schema[Keyword::all_of]) {
    for (const Value& each : all->elements())
      if (test(each)) return true;
  }
  for (const Keyword keyword : {Keyword::any_of, Keyword::one_of}) {
    if (schema[keyword] == nullptr) continue;
    for (const Value& each : schema[keyword]->elements())
      if (is_valid(each, true) && test(each)) return true;
  }
  if (const Value* const condition = schema[Keyword::if_]) {
    const Value *const then = schema[Keyword::then_], *const otherwise = schema[Keyword::else_];
    if (is_valid(*condition, true)) {
      if (test(*condition) || (then != nullptr && test(*then))) return true;
    } else if (otherwise != nullptr && is_valid(*condition, false) && test(*otherwise)) {
      return true;
    }
  }
  if (const Value* const dependent = schema[Keyword::dependent_schemas]) {
    for (const Value& each : dependent->members()) {
      const auto known = found.has.find(each.key());
      if (known != found.has.end() && known->second && test(each)) return true;
    }
  }
  return false;
}

Writer::Made Writer::property(const Case& found, const std::string& name, const Place& place) {
  if (!is_name_allowed(found, name)) return {};
  std::vector<Formula> parts;
  bool is_described = false;
  const auto add = [&](const Schema& schema, bool positive) {
    parts.push_back(formulas_.of(schema, positive));
    is_described = true;
  };
  for (const Formula part : found.atoms) {
    expressions_.budget().check();
    const Term& term = formulas_[part];
    if (term.atom == Atom::member && term.text == name) add(*term.schema, term.inner);
    if (term.atom == Atom::unevaluated_properties &&
        !is_evaluated(*term.schema, *term.schema, &name, {}, found))
      add(document_.schema(*(*term.schema)[Keyword::unevaluated_properties]), true);
    if (term.atom != Atom::members) continue;
    const Schema& schema = *term.schema;
    const auto listed = schema.properties.find(name);
    if (listed != schema.properties.end()) add(document_.schema(*listed->second), true);
    for (const Value* const each : holds_.unlisted(schema, name))
      add(document_.schema(*each), true);
  }
  return value(formulas_.all(parts), place, is_described);
}

// Builds the texts of one property that no schema lists in `properties`. If `are_all` is false, the
// name of the property must match a pattern of patternProperties. The code divides the possible
// names into classes, so that all names of a class match the same patterns.
Writer::Made Writer::more_properties(const Case& found, const std::vector<std::string>& names,
                                     bool are_all, const Place& place) {
  struct Class {
    Node names;
    std::vector<const Value*> patterns;
  };
  const bool has_patterns = std::any_of(found.atoms.begin(), found.atoms.end(), [&](Formula part) {
    const Term& term = formulas_[part];
    return term.atom == Atom::members && (*term.schema)[Keyword::pattern_properties] != nullptr;
  });
  if (!are_all && !has_patterns) return {};
  std::vector<Node> excluded;
  std::unordered_set<std::string> seen;
  const auto exclude = [&](const std::string& name) {
    if (seen.insert(name).second) excluded.push_back(expressions_.bytes(json_string(name)));
  };
  for (const std::string& name : names) exclude(name);
  exclude_names(found, exclude);
  Node some = any_string(expressions_);
  std::vector<std::pair<const Value*, const Schema*>> patterns;
  for (const Formula part : found.atoms) {
    const Term& term = formulas_[part];
    if (term.atom == Atom::names) {
      const Formula inner =
          formulas_.of(document_.schema(*(*term.schema)[Keyword::property_names]), true);
      some = expressions_.both(some, scalar(formulas_.restricted(inner, kString), kString));
    }
    if (term.atom != Atom::members) continue;
    if (const Value* const own = (*term.schema)[Keyword::pattern_properties])
      for (const Value& each : own->members()) patterns.emplace_back(&each, term.schema);
  }
  if (!excluded.empty()) some = expressions_.without(some, expressions_.either(excluded));
  std::vector<Class> classes = {{some, {}}};
  std::unordered_set<std::string_view> split;
  for (const auto& [pattern, schema] : patterns) {
    if (!split.insert(pattern->key()).second) continue;
    const Node matching = text_that_matches(pattern->key(), *schema, true),
               perhaps = text_that_matches(pattern->key(), *schema, false);
    std::vector<Class> made;
    for (Class& each : classes) {
      expressions_.budget().check_time();
      Class with{expressions_.both(each.names, matching), each.patterns};
      with.patterns.push_back(pattern);
      each.names = expressions_.without(each.names, perhaps);
      if (!holds_.automata().is_empty(each.names)) made.push_back(std::move(each));
      if (!holds_.automata().is_empty(with.names)) made.push_back(std::move(with));
    }
    classes.swap(made);
    if (classes.size() > kMostNameClasses)
      document_.refuse(*schema, Keyword::pattern_properties,
                       "has too many patterns that match the same names");
  }
  std::vector<Made> out;
  for (const Class& each : classes) {
    if (each.patterns.empty() && !are_all) continue;
    std::vector<Formula> parts;
    bool is_described = false;
    const auto add = [&](const Value& inner) {
      parts.push_back(formulas_.of(document_.schema(inner), true));
      is_described = true;
    };
    for (const Formula part : found.atoms) {
      const Term& term = formulas_[part];
      if (term.atom == Atom::unevaluated_properties &&
          !is_evaluated(*term.schema, *term.schema, nullptr, each.patterns, found))
        add(*(*term.schema)[Keyword::unevaluated_properties]);
      if (term.atom != Atom::members) continue;
      bool is_listed = false;
      if (const Value* const own = (*term.schema)[Keyword::pattern_properties]) {
        for (const Value& pattern : own->members()) {
          if (std::none_of(each.patterns.begin(), each.patterns.end(),
                           [&](const Value* other) { return other->key() == pattern.key(); }))
            continue;
          is_listed = true;
          add(pattern);
        }
      }
      const Value* const others = (*term.schema)[Keyword::additional_properties];
      if (!is_listed && others != nullptr) add(*others);
    }
    const Formula formula = formulas_.all(parts);
    if (formula == Formulas::kYes && !are_all) continue;
    const Made inner = value(formula, place, is_described);
    if (inner.node == expressions_.nothing()) continue;
    out.push_back({expressions_.sequence(
                       {each.names, expressions_.bytes(options_.layout.key_separator), inner.node}),
                   inner.size + 10});
  }
  return either(out);
}

// Calls `exclude` for each property name that occurs in the case. A property that the schema does
// not list must not have one of these names.
void Writer::exclude_names(const Case& found,
                           const std::function<void(const std::string&)>& exclude) {
  std::vector<Formula> todo(found.asserted.begin(), found.asserted.end());
  std::unordered_set<Formula> seen;
  while (!todo.empty()) {
    expressions_.budget().check();
    const Formula formula = todo.back();
    todo.pop_back();
    if (!seen.insert(formula).second) continue;
    const Term& term = formulas_[formula];
    todo.insert(todo.end(), term.parts.begin(), term.parts.end());
    if (term.op != Op::atom) continue;
    if (term.atom == Atom::has || term.atom == Atom::member) exclude(term.text);
    if (term.atom == Atom::members || term.atom == Atom::violates) {
      if (const Value* const properties = (*term.schema)[Keyword::properties])
        for (const Value& each : properties->members()) exclude(each.key());
    }
  }
}

Node Writer::text_that_matches(const std::string& pattern, const Schema& schema, bool is_sure) {
  Term term;
  term.atom = Atom::pattern, term.text = pattern, term.schema = &schema, term.positive = is_sure;
  return string_that(term, false);
}

Writer::Made Writer::object(const Case& found, const std::vector<std::string>& names,
                            const std::vector<Clause>& clauses, const Place& place) {
  Row made;
  const Term* fewest = nullptr;
  for (const Formula part : found.atoms) {
    const Term& term = formulas_[part];
    if (term.atom != Atom::property_count) continue;
    if (term.low > made.low) made.low = low_count(term, Keyword::min_properties), fewest = &term;
    if (term.high != kNoLimit)
      made.high = std::min<uint64_t>(made.high, high_count(term, Keyword::max_properties));
  }
  // Several unlisted properties may have the same name. Programs then keep only one of these
  // properties. So unlisted properties alone do not guarantee more than one property.
  if (names.empty() && made.low > 1)
    document_.refuse(*fewest->schema, Keyword::min_properties,
                     "of more than 1 is not supported without properties");
  size_t states = 0;
  for (const std::string& name : names) states += name.size() + kStatesBesideName;
  if (states > expressions_.budget().limits().states)
    throw Error(DLM_INVALID_ARGUMENT, "schema: an object of " + std::to_string(names.size()) +
                                          " properties needs more than " + std::to_string(states) +
                                          " states, and an automaton may have " +
                                          std::to_string(expressions_.budget().limits().states) +
                                          ": list fewer, or raise limits");
  const Place inner = inside(found, place);
  double size = 2;
  size_t possible = 0;
  for (const std::string& name : names) {
    expressions_.budget().check();
    const auto known = found.has.find(name);
    const bool is_required = known != found.has.end() && known->second;
    const Made each = property(found, name, inner);
    if (each.node == expressions_.nothing()) {
      if (is_required) return {};
      made.slots.push_back({each.node, false, name});
      continue;
    }
    ++possible;
    size += each.size + static_cast<double>(name.size() + kStatesBesideName);
    made.slots.push_back(
        {expressions_.sequence({expressions_.bytes(json_string(name)),
                                expressions_.bytes(options_.layout.key_separator), each.node}),
         is_required, name});
  }
  made.clauses = clauses;
  const bool are_all = names.empty() || options_.more_properties || made.low > possible;
  const Made more = more_properties(found, names, are_all, inner);
  made.more = more.node;
  size += more.size;
  const bool in_any_order = options_.any_order && possible <= kMostInAnyOrder;
  return {in_any_order ? row_in_any_order(made, false, place.level) : row(made, false, place.level),
          size};
}

}  // namespace dlm::compile::schema
