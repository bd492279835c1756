// Schemas as logical formulas about one value, in negation normal form.
//
// A formula is true only for values that are valid; it may be false for some that are valid, where
// a keyword says something that no formula here can say exactly. So the formula of a schema's
// negation is made separately, and is true only for values that are not valid.
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

// What an atom says. All but `enter`, `type` and `values` speak of values of some kinds, and are
// true for the others.
enum class Atom : uint8_t {
  enter,           // a reference leads to a counted target (low: its number) here
  type,            // of one of `kinds`; low != 0: 1.0 is not an integer (Draft 4)
  values,          // one of a list, or none of it (positive == false)
  integer,         // an integer, or a fraction; low as that of type
  bound,           // high == 0: at least `number`, else at most; low != 0: not `number` itself
  multiple,        // of `number`, or not
  length,          // low..high code points
  pattern,         // `text`, or not
  format,          // `text`
  item_count,      // low..high
  items,           // those of the keywords of `schema`
  item,            // the one at index low, if it is there, is valid by `schema` (or not: inner)
  matches,         // low..high items from index `first` on are valid by `schema` (or not: inner)
  unique,          // all items differ
  property_count,  // low..high
  has,             // a property `text`, or not
  members,         // properties, patternProperties and additionalProperties of `schema`
  member,          // the property `text`, if it is there, is valid by `schema` (or not: inner)
  violates,        // a property breaks patternProperties or additionalProperties of `schema`
  names,           // propertyNames of `schema`
  unevaluated_items,
  unevaluated_properties,
  rejected  // what no formula says: `keyword` of `schema`
};

constexpr uint64_t kNoLimit = UINT64_MAX;

// Values of an enum, without repetitions, by their keys.
struct ValueSet {
  std::vector<const json::Value*> values;
  std::vector<std::string> keys;
  std::unordered_set<std::string> lookup;
  uint8_t kinds = 0;  // of the values; of a number that is written with a fraction, both
};

struct Term {
  Op op = Op::atom;
  Atom atom = Atom::enter;
  bool positive = true;
  bool inner = true;
  uint8_t kinds = kAllKinds;  // that the term allows, at most
  uint8_t speaks_of = 0;      // kinds that its keywords speak of
  bool is_typed = false;      // says itself which kinds are allowed
  Keyword keyword = Keyword::count;
  const Schema* schema = nullptr;
  uint64_t low = 0, high = kNoLimit, first = 0;
  std::string text;
  Decimal number;
  const ValueSet* values = nullptr;
  std::vector<Formula> parts;  // of all, any; of one: each branch, and its negation
};

class Formulas {
 public:
  Formulas(Document& document, Recursion& recursion, Budget& budget);

  static constexpr Formula kNo = 0, kYes = 1;
  const Term& operator[](Formula formula) const { return terms_[formula]; }

  // Of a schema, or of its negation.
  Formula of(const Schema& schema, bool positive);
  Formula all(const std::vector<Formula>& parts);
  Formula any(const std::vector<Formula>& parts);
  Formula has(const std::string& name, bool positive, const Schema* schema);
  // That a property, if it is there, is valid by a schema, or not valid.
  Formula member(const std::string& name, const Schema& schema, bool is_valid);

  // The conjuncts of a formula.
  std::vector<Formula> conjuncts(Formula formula) const;
  // The disjuncts of an any or one.
  const std::vector<Formula>& alternatives(Formula formula);
  // The formula for a value that is of one type: kNull, kBoolean, kNumber, kString, kArray,
  // kObject.
  Formula restricted(Formula formula, uint8_t type);
  // The formula without what enters a target too deep; `counts` has the times that each is open.
  Formula entered(Formula formula, const std::vector<std::pair<uint32_t, uint32_t>>& counts,
                  uint32_t max_depth);
  // The numbers of targets that a formula enters or leads to below the value.
  const std::vector<uint32_t>& numbers(Formula formula);

  // Whether each value of `one` surely satisfies `other`.
  bool implies(Formula one, Formula other, int depth = 8);
  // What the property of a value of `formula` satisfies, as far as that is simple to say.
  Formula property(Formula formula, const std::string& name);

  // The values that a conjunct of a formula lists; nullptr if there is no such list.
  const ValueSet* listed(Formula formula) const;

  Document& document() { return document_; }
  // The kinds of one value.
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
