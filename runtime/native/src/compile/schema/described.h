// What formats other than JSON read from a JSON Schema: the properties of objects, and the texts of
// strings, numbers, booleans and nulls as they are outside of JSON.
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
  // format: its name, for messages.
  Described(Expressions& expressions, const json::Value& schema, const Options& options,
            const char* format);

  const Schema& root() { return document_.root(); }
  // The schema itself, or the one that its $ref leads to.
  const Schema& resolved(const Schema& schema);
  // Whether its `type` is this one.
  static bool is_of_type(const Schema& resolved, std::string_view type);
  // Refuses all keywords that assert something, but the given ones.
  void allow(const Schema& schema, std::initializer_list<Keyword> keywords);
  // Of an object, in the schema's order.
  std::vector<Property> properties(const Schema& object);
  // Texts of the values of a schema that allows neither arrays nor objects: strings without quotes
  // and escapes. null is the empty text.
  Node scalars(const Schema& schema);
  [[noreturn]] void refuse(const Schema& at, const std::string& why);
  // Whether a schema can contain itself.
  bool is_recursive(const Schema& schema) { return !recursion_.below(*schema.value).empty(); }

  Expressions& expressions() { return expressions_; }
  Automata& automata() { return automata_; }
  Document& document() { return document_; }
  // Of the result. Throws if there is no text.
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

// The texts of a node, with some bytes written in another way. None of the spellings may start with
// another one, or with a byte that is not in the list.
using Spellings = std::vector<std::pair<uint8_t, std::string_view>>;
Node respelled(Expressions& expressions, Automata& automata, Node node, const Spellings& spellings);

}  // namespace dlm::compile::schema
