// Expresses a JSON Schema as a logical formula about one value. For example, the schema {"type":
// "string", "minLength": 2} becomes the formula "the value is a string, and if the value is a
// string, it contains at least two code points". The parts of a formula are joined by "and" and
// "or". Only the smallest parts of a formula can be negated (negation normal form).
//
// A formula cannot express some keywords exactly. So a schema has two formulas. The positive
// formula is true only for values that are certainly valid. The negative formula is true only for
// values that are certainly invalid. For some values, both formulas are false. Formulas::of()
// returns the positive or the negative formula.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "compile/json/json_numbers.h"
#include "compile/json/json_text.h"
#include "compile/schema/document.h"
#include "compile/schema/recursion.h"

namespace dlm::compile::schema {

using Formula = uint32_t;

enum class Op : uint8_t { no, yes, atom, all, any, one };

// The kinds of atoms. Atoms are the smallest parts of a formula. Each atom makes one statement
// about a value. Most atoms apply only to values of some types, and are true for all values of
// other types. For example, `length` is true for every number. The atoms `enter`, `type` and
// `values` apply to all values.
//
// In the comments below, "(or not)" marks statements that can be negated. In a negated atom,
// Term::positive is false. For the comments with "(or not: inner)", Term::inner is false instead.
// The comments name other members of Term, such as `low` and `schema`.
enum class Atom : uint8_t {
  enter,  // always true; refers to the recursive target with number `low`
  // The value has one of the kinds in `kinds`. If `low` is not 0, numbers such as 1.0 are not
  // integers (Draft 4).
  type,
  values,   // the value is in a list of values (or not)
  integer,  // the number is an integer (or not); `low` has the same meaning as in `type`
  // `number` is a minimum if `high` is 0, otherwise a maximum. The bound is exclusive if `low` is
  // not 0.
  bound,
  multiple,        // the value is a multiple of `number` (or not)
  length,          // the string has `low` to `high` code points
  pattern,         // the string matches the pattern `text` (or not)
  format,          // the string has the format `text`
  item_count,      // the array has `low` to `high` items
  items,           // the array satisfies `items` and `prefixItems` of `schema`
  item,            // if there is an item with index `low`, `schema` allows it (or not: inner)
  matches,         // from index `first` on, `schema` allows `low` to `high` items (or not: inner)
  unique,          // all items are different
  property_count,  // the object has `low` to `high` properties
  has,             // the object has the property `text` (or not)
  members,         // the object satisfies properties, patternProperties and additionalProperties
  member,          // if there is a property `text`, `schema` allows it (or not: inner)
  violates,        // at least one property violates patternProperties or additionalProperties
  names,           // the object satisfies propertyNames of `schema`
  unevaluated_items,
  unevaluated_properties,
  rejected  // a placeholder, because no formula can express `keyword` of `schema`
};

// Returns true if an atom is about the items, properties or names of a value, to which the keywords
// of Term::schema apply schemas.
bool has_inner_values(Atom atom);

constexpr uint64_t kNoLimit = UINT64_MAX;

// The distinct values of an enum. `keys` contains the results of key_of().
struct ValueSet {
  std::vector<const json::Value*> values;
  std::vector<std::string> keys;
  std::unordered_set<std::string> lookup;
  // The kinds of the values, as a bit mask. A number such as 1.0 counts both as an integer and as a
  // fraction.
  uint8_t kinds = 0;
};

struct Term {
  Op op = Op::atom;
  Atom atom = Atom::enter;
  bool positive = true;
  bool inner = true;
  uint8_t kinds = kAllKinds;  // the formula is false for values of other kinds
  uint8_t speaks_of = 0;      // the kinds of values to which the keywords in the formula apply
  // True if the formula limits the kinds of values, as the keyword "type" does.
  bool is_typed = false;
  Keyword keyword = Keyword::count;
  const Schema* schema = nullptr;
  uint64_t low = 0, high = kNoLimit, first = 0;
  std::string text;
  Decimal number;
  const ValueSet* values = nullptr;
  // For `all` and `any`: the parts. For `one`: the branches, each followed by its negation.
  std::vector<Formula> parts;
};

// Builds, simplifies and stores formulas. Equal formulas have the same number.
class Formulas {
 public:
  Formulas(Document& document, Recursion& recursion, Budget& budget);

  static constexpr Formula kNo = 0, kYes = 1;
  const Term& operator[](Formula formula) const { return terms_[formula]; }

  // Returns the formula for the valid values of a schema. If `positive` is false, returns the
  // formula for the invalid values.
  Formula of(const Schema& schema, bool positive);
  Formula all(const std::vector<Formula>& parts);
  Formula any(const std::vector<Formula>& parts);
  Formula has(const std::string& name, bool positive, const Schema* schema);
  // Returns the formula "if the object has the property `name`, `schema` does not allow its value".
  Formula member(const std::string& name, const Schema& schema);

  // If "and" joins the parts of a formula, returns these parts. Otherwise returns a list that
  // contains only the formula itself.
  std::vector<Formula> conjuncts(Formula formula) const;
  // Returns the alternatives of a formula of kind `any` or `one`. The formula is true if and only
  // if at least one of these alternatives is true.
  const std::vector<Formula>& alternatives(Formula formula);
  // Simplifies a formula for values of a single type, which is kNull, kBoolean, kNumber, kString,
  // kArray or kObject.
  Formula restricted(Formula formula, uint8_t type);
  // Removes the branches in which the target of a recursive reference would contain itself more
  // often than `max_depth` allows. Each pair in `counts` consists of a target's number and the
  // number of containers around the value that are values of this target.
  Formula entered(Formula formula, const std::vector<std::pair<uint32_t, uint32_t>>& counts,
                  uint32_t max_depth);
  // Returns the numbers of the recursive targets to which a formula refers, for the value itself or
  // for values inside it.
  const std::vector<uint32_t>& numbers(Formula formula);

  // Returns true if `other` is certainly true for every value for which `one` is true. Otherwise,
  // or if the function cannot decide this quickly, returns false.
  bool implies(Formula one, Formula other, int depth = 8);
  // Returns a formula for the value of the property `name`. If `formula` is true for an object that
  // has this property, the returned formula is true for the property's value. The returned formula
  // contains only conditions that are easy to derive, so it may be true for more values than
  // necessary.
  Formula property(Formula formula, const std::string& name);

  // Returns a list of values that contains all values for which the formula is true. Returns
  // nullptr if the formula does not limit values to a list.
  const ValueSet* listed(Formula formula) const;

  Document& document() { return document_; }
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
