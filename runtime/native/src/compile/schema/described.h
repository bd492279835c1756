// Reads JSON Schemas for formats other than JSON: the properties of objects, and the plain texts of
// strings, numbers, booleans and nulls.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "compile/automata.h"
#include "compile/expression.h"
#include "compile/schema/document.h"
#include "compile/schema/formula.h"
#include "compile/schema/recursion.h"
#include "compile/schema/schema.h"
#include "compile/schema/writer.h"

namespace dlm::compile::schema {

struct Property {
  std::string name;
  const Schema* schema;
  bool is_required;
};

class Described {
 public:
  // `format` is the name of the format in messages.
  Described(Expressions& expressions, const json::Value& schema, const Options& options,
            const char* format);

  const Schema& root() { return document_.root(); }
  // Returns the schema, or the target of its $ref.
  const Schema& resolved(const Schema& schema);
  // Returns whether the keyword `type` is exactly this type.
  static bool is_of_type(const Schema& resolved, std::string_view type);
  // Throws if the schema has a keyword that asserts something and is not in `keywords`.
  void allow(const Schema& schema, std::initializer_list<Keyword> keywords);
  // Returns the properties of an object in the schema's order.
  std::vector<Property> properties(const Schema& object);
  // Returns the texts of a schema's values. Strings have no quotes and no escapes, and null is the
  // empty text. The schema must allow neither arrays nor objects.
  Node scalars(const Schema& schema);
  [[noreturn]] void refuse(const Schema& at, const std::string& why);
  // Returns whether the schema can contain itself.
  bool is_recursive(const Schema& schema) { return !recursion_.below(*schema.value).empty(); }

  Expressions& expressions() { return expressions_; }
  Automata& automata() { return automata_; }
  Document& document() { return document_; }
  // Returns the texts of a node with the warnings. Throws if there is no text.
  Texts texts(Node node);

 private:
  Expressions& expressions_;
  Automata automata_;
  Document document_;
  Recursion recursion_;
  Formulas formulas_;
  Writer writer_;
  const char* const format_;
};

// Returns the texts of a node with some bytes replaced by other spellings. A spelling must not be a
// prefix of another one. It must not start with a byte that is outside the list.
using Spellings = std::vector<std::pair<uint8_t, std::string_view>>;
Node respelled(Expressions& expressions, Automata& automata, Node node, const Spellings& spellings);

}  // namespace dlm::compile::schema
