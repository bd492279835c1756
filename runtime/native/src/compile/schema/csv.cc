#include <string>
#include <vector>

#include "compile/schema/described.h"
#include "compile/schema/records.h"

namespace dlm::compile::schema {
namespace {

using json::Value;

constexpr int64_t kMostRows = 1'000'000;

// Returns the value of the member `name` of the object `description`. Throws an error if the value
// is not in `known`. If the member is missing, returns the first element of `known`.
std::string chosen(const Value& description, const char* name,
                   std::initializer_list<const char*> known) {
  const Value* const given = description.find(name);
  if (given == nullptr) return *known.begin();
  std::string all;
  for (const char* const each : known) {
    if (given->string() == each) return each;
    all += (all.empty() ? "" : ", ") + json::quoted(each);
  }
  given->refuse("expected one of " + all);
}

class Table {
 public:
  Table(Expressions& expressions, const Value& description, const Options& options)
      : expressions_(expressions),
        described_(expressions, description.at("csv"), options, "csv"),
        delimiter_(chosen(description, "delimiter", {",", ";", "|", "\t"})),
        line_end_(chosen(description, "line_end", {"\n", "\r\n"})) {
    ByteSet plain;
    plain.set();
    for (const char letter : delimiter_ + "\"\r\n") plain.reset(static_cast<uint8_t>(letter));
    plain_ = expressions.repeat(expressions.set(plain), 0, kUnbounded);
  }

  Texts texts(bool has_header, uint32_t low, uint32_t high) {
    const Schema& row_schema = described_.resolved(described_.root());
    if (!Described::is_of_type(row_schema, "object"))
      described_.refuse(row_schema, "a row is a schema of type object");
    std::vector<Node> names, fields;
    const std::vector<Property> columns = described_.properties(row_schema);
    for (const Property& column : columns) {
      Node texts = described_.scalars(*column.schema);
      if (!column.is_required) texts = expressions_.optional(texts);
      names.push_back(field(expressions_.bytes(column.name), columns.size() == 1));
      fields.push_back(field(texts, columns.size() == 1));
    }
    const Node row = line(fields), line_end = expressions_.bytes(line_end_);
    if (!has_header) return described_.texts(separated(expressions_, row, line_end, low, high));
    const Node rows = expressions_.repeat(expressions_.sequence(line_end, row), low, high);
    return described_.texts(expressions_.sequence(line(names), rows));
  }

 private:
  // Writes one field. If `is_alone` is true, the field is the only field of its line. In this case,
  // an empty text is written with quotes, because programs that read CSV skip empty lines.
  Node field(Node texts, bool is_alone) {
    const Node needs_no_quotes =
        is_alone ? expressions_.without(plain_, expressions_.empty()) : plain_;
    const Node quoted = respelled(expressions_, described_.automata(),
                                  expressions_.without(texts, needs_no_quotes), {{'"', "\"\""}});
    const Node quote = expressions_.bytes("\"");
    return expressions_.either(expressions_.both(texts, needs_no_quotes),
                               expressions_.sequence({quote, quoted, quote}));
  }

  Node line(const std::vector<Node>& fields) {
    std::vector<Node> parts;
    for (const Node each : fields) {
      if (!parts.empty()) parts.push_back(expressions_.bytes(delimiter_));
      parts.push_back(each);
    }
    return expressions_.sequence(parts);
  }

  Expressions& expressions_;
  Described described_;
  const std::string delimiter_, line_end_;
  Node plain_;  // all texts that a field may contain without quotes
};

}  // namespace

Texts csv_texts(Expressions& expressions, const Value& description, const Options& options) {
  const Value* const header = description.find("header");
  const auto [low, high] = counts(description, 1, kMostRows);
  return Table(expressions, description, options)
      .texts(header == nullptr || header->boolean(), low, high);
}

}  // namespace dlm::compile::schema
