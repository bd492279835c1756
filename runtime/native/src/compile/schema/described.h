// Interprets a JSON Schema that describes the data in a text of another format, such as CSV or XML.
// csv.cc and xml.cc use this code. It lists the properties of objects. It also returns the texts of
// strings, numbers, booleans and nulls, without JSON quotes and escapes.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "compile/automata/automata.h"
#include "compile/automata/expression.h"
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
  // Error messages contain `format`, the name of the text format, such as "csv".
  Described(Expressions& expressions, const json::Value& schema, const Options& options,
            const char* format);

  const Schema& root() { return document_.root(); }
  // Returns the target of a schema's $ref. If there is no $ref, returns the schema itself.
  const Schema& resolved(const Schema& schema);
  // Returns true if the keyword `type` of a schema allows only the given type.
  static bool is_of_type(const Schema& resolved, std::string_view type);
  // Throws an error if the schema contains a keyword that constrains values, unless the keyword is
  // in `keywords`.
  void allow(const Schema& schema, std::initializer_list<Keyword> keywords);
  // Returns the properties of an object, in the order of the schema.
  std::vector<Property> properties(const Schema& object);
  // Returns the texts of the values that a schema allows. Strings are written without quotes and
  // escapes, and null is written as the empty text. The schema must not allow arrays or objects.
  Node scalars(const Schema& schema);
  [[noreturn]] void refuse(const Schema& at, const std::string& why);
  // Returns true if references inside a schema lead to a recursive schema. A schema is recursive if
  // its values can contain values of the same schema.
  bool is_recursive(const Schema& schema) { return !recursion_.below(*schema.value).empty(); }

  Expressions& expressions() { return expressions_; }
  Automata& automata() { return automata_; }
  Document& document() { return document_; }
  // Returns the node together with all warnings so far. Throws an error if the node's set of texts
  // is empty.
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

// respelled() returns the texts of a node, but replaces each byte that has a spelling by this
// spelling. For example, the spelling of & in XML is &amp;. No spelling may be the start of another
// spelling. The first byte of each spelling must be a byte that has a spelling.
using Spellings = std::vector<std::pair<uint8_t, std::string_view>>;
Node respelled(Expressions& expressions, Automata& automata, Node node, const Spellings& spellings);

}  // namespace dlm::compile::schema
