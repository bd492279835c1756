#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compile/automata/depths.h"
#include "compile/schema/described.h"
#include "compile/schema/records.h"

namespace dlm::compile::schema {
namespace {

using json::Value;

constexpr uint32_t kMostElementNesting = 300;

// The characters that XML 1.0 allows (production 2).
const CodePoints kCharacters = {
    {0x9, 0xA}, {0xD, 0xD}, {0x20, 0xD7FF}, {0xE000, 0xFFFD}, {0x10000, 0x10FFFF}};

// XML parsers change line breaks to \n, and change white space in attributes to spaces. But they do
// not change character references such as &#13;. So if a parser would change a character, the
// compiled language contains a character reference in its place.
const Spellings kInElements = {{'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'\r', "&#13;"}};
const Spellings kInAttributes = {{'&', "&amp;"},  {'<', "&lt;"},  {'>', "&gt;"},  {'\r', "&#13;"},
                                 {'\n', "&#10;"}, {'\t', "&#9;"}, {'"', "&quot;"}};

bool is_name(const std::string& name) {
  const auto is_letter = [](char letter) {
    return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') || letter == '_';
  };
  if (name.empty() || !is_letter(name[0])) return false;
  std::string start = name.substr(0, 3);
  std::transform(start.begin(), start.end(), start.begin(),
                 [](char letter) { return static_cast<char>(letter | 0x20); });
  return start != "xml" && std::all_of(name.begin(), name.end(), [&](char letter) {
           return is_letter(letter) || (letter >= '0' && letter <= '9') || letter == '-' ||
                  letter == '.';
         });
}

class Elements {
 public:
  Elements(Expressions& expressions, const Value& schema, const Options& options)
      : expressions_(expressions),
        described_(expressions, schema, options, "xml"),
        max_depth_(options.max_depth.value_or(kUsualDepth)) {}

  Texts texts() {
    const Schema& root = described_.root();
    const std::string name = name_of(root, "");
    if (name.empty())
      described_.refuse(root, "give the root element a name: \"xml\": {\"name\": \"...\"}");
    return described_.texts(element(root, name, 0));
  }

 private:
  // Returns the member `key` of a schema's keyword `xml`. If the schema lacks this member, returns
  // the member from the target of the schema's $ref.
  const Value* xml(const Schema& schema, const char* key) {
    for (const Schema* at : {&schema, &described_.resolved(schema)}) {
      const Value* const found = at->is_boolean() ? nullptr : at->value->find("xml");
      if (found == nullptr) continue;
      found->refuse_unknown({"name", "attribute", "wrapped"});
      if (const Value* const value = found->find(key)) return value;
    }
    return nullptr;
  }
  bool is_set(const Schema& schema, const char* key) {
    const Value* const found = xml(schema, key);
    return found != nullptr && found->boolean();
  }
  std::string name_of(const Schema& schema, const std::string& otherwise) {
    const Value* const given = xml(schema, "name");
    const std::string name = given == nullptr ? otherwise : given->string();
    if (!name.empty() && !is_name(name))
      described_.refuse(schema, json::quoted(name) +
                                    " is not a name of an element: give one of ASCII letters, "
                                    "digits, _, - and . that starts with a letter, with \"xml\": "
                                    "{\"name\": \"...\"}");
    return name;
  }

  Node text(const Schema& schema, const Spellings& spellings) {
    const Node any = expressions_.repeat(expressions_.characters(kCharacters), 0, kUnbounded);
    return respelled(expressions_, described_.automata(),
                     expressions_.both(described_.scalars(schema), any), spellings);
  }

  Node element(const Schema& schema, const std::string& name, uint32_t level) {
    expressions_.budget().check();
    if (level > kMostElementNesting) described_.refuse(schema, "elements are nested too deep");
    const bool is_kept = !described_.is_recursive(schema);
    const auto key = std::make_pair(schema.value, name);
    if (const auto found = kept_.find(key); is_kept && found != kept_.end()) return found->second;
    const Node node = expressions_.sequence({expressions_.bytes("<" + name), content(schema, level),
                                             expressions_.bytes("</" + name + ">")});
    if (is_kept) kept_.emplace(key, node);
    return node;
  }

  // Writes the part of an element between its name and its end tag: the attributes, the end of the
  // start tag, and the content.
  Node content(const Schema& schema, uint32_t level) {
    const Node closed = expressions_.bytes(">");
    if (is_array(schema))
      described_.refuse(schema, "an element cannot be an array: put it into a property");
    if (!is_object(schema)) return expressions_.sequence(closed, text(schema, kInElements));
    const Schema& object = described_.resolved(schema);
    uint32_t& open = open_[&object];
    if (open > max_depth_) return expressions_.nothing();
    ++open;
    std::vector<Node> attributes, children;
    for (const Property& each : described_.properties(object)) {
      const bool is_attribute = is_set(*each.schema, "attribute");
      const Node made = is_attribute ? attribute(each) : child(each, level);
      (is_attribute ? attributes : children)
          .push_back(each.is_required ? made : expressions_.optional(made));
    }
    --open_[&object];
    attributes.push_back(closed);
    attributes.insert(attributes.end(), children.begin(), children.end());
    return expressions_.sequence(attributes);
  }

  bool is_object(const Schema& schema) {
    return Described::is_of_type(described_.resolved(schema), "object");
  }
  bool is_array(const Schema& schema) {
    return Described::is_of_type(described_.resolved(schema), "array");
  }

  Node attribute(const Property& property) {
    return expressions_.sequence(
        {expressions_.bytes(" " + name_of(*property.schema, property.name) + "=\""),
         text(*property.schema, kInAttributes), expressions_.bytes("\"")});
  }

  Node child(const Property& property, uint32_t level) {
    const Schema& schema = *property.schema;
    if (!is_array(schema)) return element(schema, name_of(schema, property.name), level + 1);
    const Schema& array = described_.resolved(schema);
    described_.allow(array,
                     {Keyword::type, Keyword::items, Keyword::min_items, Keyword::max_items});
    const Value* const items = array[Keyword::items];
    if (items == nullptr || items->kind() == Value::Kind::array)
      described_.refuse(array, "an array needs one schema for its items");
    const bool is_wrapped = is_set(schema, "wrapped");
    const std::string outer = is_wrapped ? name_of(schema, property.name) : property.name;
    const Schema& item = described_.document().schema(*items);
    const Node one = element(item, name_of(item, outer), level + 1);
    const auto count = [&](Keyword keyword, uint32_t otherwise) {
      const Value* const given = array[keyword];
      return given == nullptr ? otherwise : static_cast<uint32_t>(given->number(0, 1e6));
    };
    const uint32_t low = count(Keyword::min_items, 0), high = count(Keyword::max_items, kUnbounded);
    if (low > high) return expressions_.nothing();
    const Node all = expressions_.repeat(one, low, high);
    return is_wrapped ? expressions_.sequence({expressions_.bytes("<" + outer + ">"), all,
                                               expressions_.bytes("</" + outer + ">")})
                      : all;
  }

  Expressions& expressions_;
  Described described_;
  const uint32_t max_depth_;
  // For each schema: the number of open elements of this schema.
  std::unordered_map<const Schema*, uint32_t> open_;
  std::map<std::pair<const Value*, std::string>, Node> kept_;
};

}  // namespace

Texts xml_texts(Expressions& expressions, const Value& schema, const Options& options) {
  return Elements(expressions, schema, options).texts();
}

}  // namespace dlm::compile::schema
