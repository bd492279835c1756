// Decides if a formula is true for one known value. The compiler uses this code for the values of
// enum and const, and for the names of properties.
#pragma once

#include <array>
#include <string>
#include <unordered_map>
#include <vector>

#include "compile/automata/automata.h"
#include "compile/json/ecma_pattern.h"
#include "compile/schema/formula.h"

namespace dlm::compile::schema {

class Holds {
 public:
  Holds(Expressions& expressions, Formulas& formulas)
      : expressions_(expressions), formulas_(formulas), automata_(expressions) {}

  bool value(Formula formula, const json::Value& value);
  // Does the same as value(), for the string `text`.
  bool text(Formula formula, const std::string& text);
  // Returns true if a pattern matches the name of a property. Throws an error if some regex engines
  // find a match and others do not.
  bool matches(const std::string& pattern, const std::string& name, const Schema& at);
  // Returns the schemas that patternProperties and additionalProperties of a schema apply to the
  // property `name`.
  std::vector<const json::Value*> unlisted(const Schema& schema, const std::string& name);

  Automata& automata() { return automata_; }

 private:
  bool atom(const Term& term, const json::Value& value);
  bool number(const Term& term, const json::Value& value) const;
  bool array(const Term& term, const json::Value& value);
  bool object(const Term& term, const json::Value& value);
  bool text_atom(const Term& term, const std::string& text);
  bool matches(const std::string& pattern, const std::string& text, const Schema& at, Found found);
  template <typename Test>
  bool connected(const Term& term, const Test& test);

  Expressions& expressions_;
  Formulas& formulas_;
  Automata automata_;
  // For each value of Found: the nodes of the patterns that were used so far.
  std::array<std::unordered_map<std::string, Node>, 2> patterns_;
  std::unordered_map<std::string, Node> formats_;
};

}  // namespace dlm::compile::schema
