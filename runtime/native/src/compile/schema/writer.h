// Converts a formula to a regular language, the set of all JSON texts whose values make the formula
// true. In this class, "to write" a value means to build the node for its texts.
//
// The writer splits the formula of an array or object into cases. In a case, "or" occurs only in
// conditions on the presence of properties. For example, the writer splits {"anyOf": [A, B]} into
// two cases. The language is the union of all cases. In each case, the text of an object is a row
// of properties in the order of the schema, and the text of an array is a row of items.
//
// Objects contain only properties that a schema of the case names, unless the options say
// otherwise. If a formula occurs at several places with the same layout, these places share one
// node.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compile/automata/expression.h"
#include "compile/schema/formula.h"
#include "compile/schema/holds.h"
#include "compile/schema/layout.h"

namespace dlm::compile::schema {

struct WriterOptions {
  Layout layout;
  // Largest number of times that values of a schema may be nested inside each other.
  uint32_t max_depth = 3;
  uint32_t any_depth = 3;  // largest nesting depth of values that a schema does not constrain
  // If a string has a maxLength, the string is not longer than this, unless its minLength is
  // larger.
  uint32_t most_characters = kUnbounded;
  // Objects with up to kMostInAnyOrder properties may have these properties in any order.
  bool any_order = false;
  bool more_properties = false;  // objects may have properties that the schema does not name
};

constexpr size_t kMostInAnyOrder = 6;

class Writer {
 public:
  // A node, and the estimated number of states of its automaton.
  struct Made {
    Node node = 0;
    double size = 0;
  };

  Writer(Expressions& expressions, Formulas& formulas, const WriterOptions& options);

  // Builds the node for all values for which a formula is true. `level` is the number of containers
  // (arrays and objects) around the values. `root` is the number that Recursion gives to the schema
  // of these values, or kNotCounted.
  Made values(Formula formula, uint32_t level, uint32_t root);
  // Builds the node for all JSON objects.
  Made any_object(uint32_t level);
  // Returns true if some strings were left out because of most_characters.
  bool has_cut_strings() const { return has_cut_strings_; }
  // Returns the restrictions because of which valid values may have been left out, as one text. The
  // text is empty if there are none.
  std::string limits() const;

 private:
  // Each pair consists of the number that the class Recursion gives to a schema, and a count. The
  // numbers are in ascending order.
  using Counts = std::vector<std::pair<uint32_t, uint32_t>>;

  // Describes the containers and schemas around a value.
  struct Place {
    uint32_t level;
    // For each schema that Recursion counts: the number of containers around the current value that
    // are values of the schema.
    Counts counts;
  };

  // One case of an array or object. All atoms and all choices of the case must be true. A choice is
  // a formula with alternatives, at least one of which must be true.
  struct Case {
    std::vector<Formula> atoms, choices;
    std::unordered_set<Formula> asserted;  // every formula that the case requires
    std::map<std::string, bool, std::less<>> has;
    bool is_dead = false;
  };

  // One possible part of a row: a property of an object, or an item of an array whose items must
  // all be different.
  struct Slot {
    Node node;
    bool is_required;
    std::string name;
  };
  struct Literal {
    size_t slot;
    bool is_there;
  };
  using Clause = std::vector<Literal>;
  struct Row {
    std::vector<Slot> slots;
    std::vector<Clause> clauses;  // in each clause, at least one literal must be true
    uint64_t low = 0, high = kNoLimit;
    // The texts of one property that the schema does not list. Several such properties may come
    // after the slots.
    Node more = 0;
  };

  Formula entered(Formula formula, const Counts& counts);
  Made value(Formula formula, const Place& place, bool is_described);
  Made written(Formula formula, const Place& place);
  Made anything(uint32_t level, uint32_t around);
  Made either(const std::vector<Made>& some);

  // The next functions write strings, numbers, booleans and null. If `is_counted` is true, the
  // caller limits the length of the strings.
  Node scalar(Formula formula, uint8_t type, bool is_counted = false);
  Node scalar_case(const std::vector<Formula>& parts, uint8_t type, bool is_counted);
  Node number_case(const std::vector<Formula>& parts);
  Node string_case(const std::vector<Formula>& parts, bool is_counted);
  Node not_multiple(const Term& term);
  Node other_numbers(const ValueSet& values);
  Node string_that(const Term& term, bool is_counted);
  uint32_t low_count(const Term& term, Keyword keyword);
  uint32_t high_count(const Term& term, Keyword keyword);

  // The next functions write arrays and objects.
  Made container_values(Formula formula, uint8_t type, const Place& place);
  std::optional<size_t> next_choice(const Case& found, uint8_t type,
                                    const std::vector<std::string>& names);
  void split(Case found, size_t choice, std::vector<Formula> ways, std::vector<Case>& open);
  bool expand_violation(Case& found, const std::vector<std::string>& names,
                        std::vector<Case>& open);
  void split_with_names(const Case& found, size_t choice, const std::vector<std::string>& names,
                        std::vector<Case>& open);
  void refuse_violation(Formula formula);
  void assert_all(Case& found, std::vector<Formula> todo);
  bool propagate(Case& found);
  Formula reduced(Formula formula, const Case& found, const std::vector<std::string>* names);
  Formula reduced_choice(Formula choice, const Case& found, const std::vector<std::string>& names);
  Formula violation(const Term& term, const std::vector<std::string>& names);
  bool adds_structure(Formula formula, const std::vector<std::string>& names, bool with_names);
  bool clauses_of(Formula choice, const std::vector<std::string>& names, std::vector<Clause>& out);
  std::vector<std::string> names_of(const Case& found);
  Made listed_values(const Case& found, const ValueSet& values, const Place& place);
  Place inside(const Case& found, const Place& place) const;
  bool is_asserted(Formula formula, const Case& found, uint8_t type);

  Made object(const Case& found, const std::vector<std::string>& names,
              const std::vector<Clause>& clauses, const Place& place);
  Made property(const Case& found, const std::string& name, const Place& place);
  bool is_name_allowed(const Case& found, const std::string& name);
  Made more_properties(const Case& found, const std::vector<std::string>& names, bool are_all,
                       const Place& place);
  bool is_evaluated(const Schema& schema, const Schema& by, const std::string* name,
                    const std::vector<const json::Value*>& patterns, const Case& found);
  bool any_applied(const Schema& schema, const Case& found, uint8_t type,
                   const std::function<bool(const json::Value&)>& test);
  void exclude_names(const Case& found, const std::function<void(const std::string&)>& exclude);
  Node text_that_matches(const std::string& pattern, const Schema& schema, bool is_sure);
  Node end_of_row(const Row& row, bool is_array, const Layout::Around& around, uint64_t count);
  Node row(const Row& row, bool is_array, uint32_t level);
  Node row_in_any_order(const Row& row, bool is_array, uint32_t level);

  Made array(const Case& found, const Place& place);
  Made array_with_matches(const Case& found, const std::vector<const Term*>& matches,
                          const Place& place, size_t prefix, uint64_t low, uint32_t high);
  std::optional<Made> unique_array(Formula item, uint64_t low, uint64_t high, const Place& place);
  bool finite(Formula formula, uint32_t level, std::map<std::string, Node>& keyed,
              std::vector<std::string>& order);
  std::pair<Formula, bool> item(const Case& found, size_t index);
  size_t evaluated_items(const Schema& schema, const Schema& by, const Case& found);

  Expressions& expressions_;
  Formulas& formulas_;
  Document& document_;
  Holds holds_;
  const WriterOptions options_;
  bool has_cut_strings_ = false;
  std::set<std::string> limits_;
  uint32_t depth_ = 0;
  size_t cases_ = 0, steps_ = 0;
  std::unordered_map<std::string, Made> made_;
  std::unordered_map<uint64_t, Node> scalars_;
  std::unordered_map<std::string, Node> patterns_;
  std::map<std::pair<uint32_t, uint32_t>, Made> any_;
};

}  // namespace dlm::compile::schema
