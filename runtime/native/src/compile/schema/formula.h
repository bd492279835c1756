// Expresses a JSON Schema as a logical formula about one value. For example, the schema {"type":
// "string", "minLength": 2} becomes the formula "the value is a string, and if it is a string, it
// has at least two code points". The parts of a formula are joined by "and" and "or". Negations
// occur only in the smallest parts (negation normal form).
//
// If the formula of a schema is true for a value, the value is certainly valid. The formula may be
// false for some valid values, because some keywords cannot be expressed exactly. So the invalid
// values need a second formula. If the second formula is true for a value, the value is certainly
// invalid. Formulas::of() returns the first formula for `positive`, and the second one otherwise.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "compile/json_numbers.h"
#include "compile/json_text.h"
#include "compile/schema/document.h"
#include "compile/schema/recursion.h"

namespace dlm::compile::schema {

using Formula = uint32_t;

enum class Op : uint8_t { no, yes, atom, all, any, one };

// The kinds of atoms, which are the smallest parts of a formula. Each atom makes one statement
// about a value. Most atoms apply only to some types, like their keywords, and are true for values
// of other types. For example, `length` is true for every number. The atoms `enter`, `type` and
// `values` apply to all values.
//
// "(or not)" marks statements that can be negated. The negated atom has `positive` = false, or
// `inner` = false if the line says "inner". `schema` means Term::schema, the schema that has the
// keywords.
enum class Atom : uint8_t {
  enter,           // always true; records that a recursive reference enters target `low`
  type,            // is of one of `kinds`; low != 0: 1.0 is not an integer (Draft 4)
  values,          // is in a list of values (or not)
  integer,         // is an integer (or a fraction); `low` is used as in `type`
  bound,           // high == 0: minimum `number`, else maximum; low != 0: exclusive
  multiple,        // is a multiple of `number` (or not)
  length,          // has low..high code points
  pattern,         // matches the pattern `text` (or not)
  format,          // has the format `text`
  item_count,      // has low..high items
  items,           // satisfies `items` and `prefixItems` of `schema`
  item,            // item `low`, if present, is valid by `schema` (or not: inner)
  matches,         // low..high items from index `first` on are valid by `schema` (or not: inner)
  unique,          // all items are different
  property_count,  // has low..high properties
  has,             // has the property `text` (or not)
  members,         // satisfies properties, patternProperties and additionalProperties
  member,          // property `text`, if present, is valid by `schema` (or not: inner)
  violates,        // some property violates patternProperties or additionalProperties
  names,           // satisfies propertyNames of `schema`
  unevaluated_items,
  unevaluated_properties,
  rejected  // placeholder: no formula can express `keyword` of `schema`
};

constexpr uint64_t kNoLimit = UINT64_MAX;

// The distinct values of an enum, with their keys from key_of().
struct ValueSet {
  std::vector<const json::Value*> values;
  std::vector<std::string> keys;
  std::unordered_set<std::string> lookup;
  uint8_t kinds = 0;  // of the values; both number kinds for a number such as 1.0
};

struct Term {
  Op op = Op::atom;
  Atom atom = Atom::enter;
  bool positive = true;
  bool inner = true;
  uint8_t kinds = kAllKinds;  // the term is false for values of other kinds
  uint8_t speaks_of = 0;      // the kinds to which the keywords of the term apply
  bool is_typed = false;      // whether the term itself limits the kinds, like "type" does
  Keyword keyword = Keyword::count;
  const Schema* schema = nullptr;
  uint64_t low = 0, high = kNoLimit, first = 0;
  std::string text;
  Decimal number;
  const ValueSet* values = nullptr;
  std::vector<Formula> parts;  // of all and any; for one: each branch, followed by its negation
};

// Builds, simplifies and stores formulas. Equal formulas have the same number.
class Formulas {
 public:
  Formulas(Document& document, Recursion& recursion, Budget& budget);

  static constexpr Formula kNo = 0, kYes = 1;
  const Term& operator[](Formula formula) const { return terms_[formula]; }

  // Returns the formula of a schema for valid values, or the formula for invalid values if
  // `positive` is false.
  Formula of(const Schema& schema, bool positive);
  Formula all(const std::vector<Formula>& parts);
  Formula any(const std::vector<Formula>& parts);
  Formula has(const std::string& name, bool positive, const Schema* schema);
  // Returns the statement that a property, if present, is valid (or invalid) by a schema.
  Formula member(const std::string& name, const Schema& schema, bool is_valid);

  // Returns the parts of a formula that are joined by "and". A formula of another kind is its only
  // part.
  std::vector<Formula> conjuncts(Formula formula) const;
  // Returns the alternatives of a formula of kind `any` or `one`. The formula is true if and only
  // if at least one of them is true.
  const std::vector<Formula>& alternatives(Formula formula);
  // Simplifies a formula for values of one type: kNull, kBoolean, kNumber, kString, kArray or
  // kObject.
  Formula restricted(Formula formula, uint8_t type);
  // Removes the branches that enter a target more often than `max_depth` allows. `counts` has pairs
  // of the number of a target and how often the target already contains the value.
  Formula entered(Formula formula, const std::vector<std::pair<uint32_t, uint32_t>>& counts,
                  uint32_t max_depth);
  // Returns the numbers of the targets that a formula enters, for the value itself or for values
  // inside it.
  const std::vector<uint32_t>& numbers(Formula formula);

  // Returns true if `other` is certainly true for each value for which `one` is true. Returns false
  // if this is not so, or if it cannot be shown quickly.
  bool implies(Formula one, Formula other, int depth = 8);
  // Returns a formula that is true for the property `name` of every value of `formula`. It contains
  // only conditions that are simple to derive, so it may allow more values than necessary.
  Formula property(Formula formula, const std::string& name);

  // Returns a list of values that contains all values of the formula. Returns nullptr if no part of
  // the formula has such a list.
  const ValueSet* listed(Formula formula) const;

  Document& document() { return document_; }
  // Returns the kinds of one JSON value.
  static uint8_t kinds_of(const json::Value& value);

 private:
  Formula add(Term term);
  Formula type(uint8_t kinds, bool is_draft_4 = false);
  Formula atom(Atom kind, const Schema& schema, uint8_t speaks_of, Term made = {});
  Formula values(const Schema& schema, Keyword keyword, bool positive);
  Formula values(std::vector<const json::Value*> values, const Schema* schema, bool positive);
  Formula differs(const json::Value& value, const Schema& schema);
  const Schema& constant(const json::Value& value, const Schema& schema);
  Formula one(const std::vector<Formula>& pairs);
  Formula several(const std::vector<Formula>& branches, size_t from, size_t to);
  Formula written(const Schema& schema, bool positive);
  Formula range(Atom kind, const Schema& schema, uint8_t type, uint64_t low, uint64_t high,
                bool positive);
  void numbers_of(const Schema& schema, bool positive, std::vector<Formula>& out);
  void strings_of(const Schema& schema, bool positive, std::vector<Formula>& out);
  void arrays_of(const Schema& schema, bool positive, std::vector<Formula>& out);
  void objects_of(const Schema& schema, bool positive, std::vector<Formula>& out);
  void dependencies_of(const Schema& schema, bool positive, std::vector<Formula>& out);
  void applied_of(const Schema& schema, bool positive, std::vector<Formula>& out);
  Formula reference(const Schema& schema, Keyword keyword, bool positive);
  Formula rejected(const Schema& schema, Keyword keyword, uint8_t type);
  uint64_t count(const Schema& schema, Keyword keyword, uint64_t otherwise);
  bool are_told_apart(const std::vector<Formula>& pairs);
  const ValueSet* unlisted(Formula formula, const std::string& name, bool within, bool* is_typed);

  Document& document_;
  Recursion& recursion_;
  Budget& budget_;
  size_t bytes_ = 0;
  std::deque<Term> terms_;
  std::unordered_map<std::string, Formula> by_content_;
  std::deque<ValueSet> sets_;
  std::unordered_map<std::string, const ValueSet*> sets_by_content_;
  std::unordered_map<const json::Value*, Schema> constants_;
  std::unordered_map<const Schema*, Formula> positive_, negative_;
  std::unordered_set<const Schema*> open_;
  std::unordered_map<uint64_t, Formula> restricted_;
  std::unordered_map<Formula, std::vector<Formula>> alternatives_;
  std::unordered_map<Formula, std::vector<uint32_t>> numbers_;
};

}  // namespace dlm::compile::schema
