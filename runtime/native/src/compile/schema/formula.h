// Expresses a schema as a logical formula about one value, in negation normal form.
//
// If the formula of a schema is true for a value, the value is valid. The formula may be false for
// some valid values, because some keywords cannot be expressed exactly. So the negation of the
// formula does not describe the invalid values. A second formula is built for them: if the second
// formula is true for a value, the value is invalid.
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

// The statements that atoms make. Atoms other than `enter`, `type` and `values` apply to values of
// some kinds, and are true for values of all other kinds. "(or not)" describes an atom whose
// `positive` is false, or whose `inner` is false if the line says so. Keywords are those of
// `schema`.
enum class Atom : uint8_t {
  enter,           // a reference leads to a counted target (low: its number)
  type,            // is one of `kinds`; low != 0: 1.0 is not an integer (Draft 4)
  values,          // is in a list of values (or not)
  integer,         // is an integer (or a fraction); `low` as for type
  bound,           // high == 0: at least `number`, else at most; low != 0: exclusive
  multiple,        // is a multiple of `number` (or not)
  length,          // has low..high code points
  pattern,         // matches the pattern `text` (or not)
  format,          // has the format `text`
  item_count,      // low..high
  items,           // satisfies the item keywords of `schema`
  item,            // item `low`, if present, is valid by `schema` (or not: inner)
  matches,         // low..high items from `first` on are valid by `schema` (or not: inner)
  unique,          // all items differ
  property_count,  // low..high
  has,             // has the property `text` (or not)
  members,         // satisfies properties, patternProperties and additionalProperties
  member,          // property `text`, if present, is valid by `schema` (or not: inner)
  violates,        // a property violates patternProperties or additionalProperties
  names,           // satisfies propertyNames of `schema`
  unevaluated_items,
  unevaluated_properties,
  rejected  // no formula can express `keyword` of `schema`
};

constexpr uint64_t kNoLimit = UINT64_MAX;

// The distinct values of an enum, with their keys.
struct ValueSet {
  std::vector<const json::Value*> values;
  std::vector<std::string> keys;
  std::unordered_set<std::string> lookup;
  uint8_t kinds = 0;  // of the values; both number kinds if written with a fraction
};

struct Term {
  Op op = Op::atom;
  Atom atom = Atom::enter;
  bool positive = true;
  bool inner = true;
  uint8_t kinds = kAllKinds;  // a superset of the kinds that the term allows
  uint8_t speaks_of = 0;      // kinds to which its keywords apply
  bool is_typed = false;      // itself limits the allowed kinds
  Keyword keyword = Keyword::count;
  const Schema* schema = nullptr;
  uint64_t low = 0, high = kNoLimit, first = 0;
  std::string text;
  Decimal number;
  const ValueSet* values = nullptr;
  std::vector<Formula> parts;  // for all and any; for one: each branch and its negation
};

class Formulas {
 public:
  Formulas(Document& document, Recursion& recursion, Budget& budget);

  static constexpr Formula kNo = 0, kYes = 1;
  const Term& operator[](Formula formula) const { return terms_[formula]; }

  // Returns the formula of a schema, or of its negation.
  Formula of(const Schema& schema, bool positive);
  Formula all(const std::vector<Formula>& parts);
  Formula any(const std::vector<Formula>& parts);
  Formula has(const std::string& name, bool positive, const Schema* schema);
  // States that a property, if present, is valid (or invalid) by a schema.
  Formula member(const std::string& name, const Schema& schema, bool is_valid);

  // Returns the conjuncts of a formula.
  std::vector<Formula> conjuncts(Formula formula) const;
  // Returns the disjuncts of a formula of kind `any` or `one`.
  const std::vector<Formula>& alternatives(Formula formula);
  // Returns the formula for a value of one type: kNull, kBoolean, kNumber, kString, kArray or
  // kObject.
  Formula restricted(Formula formula, uint8_t type);
  // Removes branches that enter a target too deeply. `counts` has how often each target is open.
  Formula entered(Formula formula, const std::vector<std::pair<uint32_t, uint32_t>>& counts,
                  uint32_t max_depth);
  // Returns the numbers of the targets that a formula enters, or can reach below the value.
  const std::vector<uint32_t>& numbers(Formula formula);

  // Returns whether each value of `one` certainly satisfies `other`.
  bool implies(Formula one, Formula other, int depth = 8);
  // Returns a formula for a property of a value of `formula`. It has the conditions that are simple
  // to derive.
  Formula property(Formula formula, const std::string& name);

  // Returns the values that a conjunct of a formula lists, or nullptr if there is no such list.
  const ValueSet* listed(Formula formula) const;

  Document& document() { return document_; }
  // Returns the kinds of one value.
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
