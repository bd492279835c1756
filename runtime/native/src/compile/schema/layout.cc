#include "compile/schema/layout.h"

#include <algorithm>

#include "compile/json/json_numbers.h"
#include "compile/json/json_text.h"

namespace dlm::compile::schema {

using json::Value;
using Kind = Value::Kind;

Layout::Around Layout::around(uint32_t level, bool is_array) const {
  if (indent >= 0) {
    const auto line = [&](uint32_t at) {
      return "\n" + std::string(static_cast<size_t>(indent) * at, ' ');
    };
    return {line(level + 1), item_separator + line(level + 1), line(level)};
  }
  if (has_lines && is_array && level == 0) return {"\n", item_separator + "\n", "\n"};
  return {"", item_separator, ""};
}

uint32_t Layout::kind_of_level(uint32_t level) const {
  if (indent >= 0) return level;
  return has_lines && level > 0 ? 1 : 0;
}

std::string text_of(const Value& value, const Layout& layout, uint32_t level) {
  switch (value.kind()) {
    case Kind::null:
      return "null";
    case Kind::boolean:
      return value.boolean() ? "true" : "false";
    case Kind::number: {
      // JSON Schema says that 1.0 equals 1. Programs that expect an integer reject 1.0, but
      // programs that expect a fraction accept 1.
      const Decimal number = Decimal::parse(value.written());
      constexpr int64_t kMostDigits = 15;  // every double represents these integers exactly
      const auto integer = number.integer(kMostDigits);
      return number.is_plain || !integer.has_value() ? value.written() : std::to_string(*integer);
    }
    case Kind::string:
      return json_string(value.string());
    case Kind::array:
    case Kind::object:
      break;
  }
  const bool is_array = value.kind() == Kind::array;
  const std::vector<Value>& items = is_array ? value.elements() : value.members();
  std::string out = is_array ? "[" : "{";
  if (!items.empty()) {
    const Layout::Around around = layout.around(level, is_array);
    out += around.start;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += around.between;
      if (!is_array) out.append(json_string(items[i].key())).append(layout.key_separator);
      out += text_of(items[i], layout, level + 1);
    }
    out += around.end;
  }
  return out + (is_array ? ']' : '}');
}

std::string key_of(const Decimal& number) {
  if (number.is_zero()) return "#0";
  return (number.is_negative ? "#-" : "#") + number.digits + "e" + std::to_string(number.exponent);
}

std::string key_of(const Value& value) {
  const auto text = [](const std::string& found) {
    return std::to_string(found.size()) + ":" + found;
  };
  switch (value.kind()) {
    case Kind::null:
      return "n";
    case Kind::boolean:
      return value.boolean() ? "t" : "f";
    case Kind::number:
      return key_of(Decimal::parse(value.written()));
    case Kind::string:
      return "s" + text(value.string());
    case Kind::array: {
      std::string out = "[";
      for (const Value& item : value.elements()) out += key_of(item);
      return out + "]";
    }
    case Kind::object: {
      std::vector<const Value*> members;
      for (const Value& member : value.members()) members.push_back(&member);
      std::sort(members.begin(), members.end(),
                [](const Value* one, const Value* other) { return one->key() < other->key(); });
      std::string out = "{";
      for (const Value* const member : members) out += text(member->key()) + key_of(*member);
      return out + "}";
    }
  }
  return "";
}

Node container(Expressions& expressions, const Layout::Around& around, bool is_array, Node item,
               uint32_t low, uint32_t high) {
  const Node opening = expressions.bytes(is_array ? "[" : "{");
  const Node closing = expressions.bytes(is_array ? "]" : "}");
  if (high == 0) return low == 0 ? expressions.sequence(opening, closing) : expressions.nothing();
  if (low > high) return expressions.nothing();
  const Node more =
      expressions.repeat(expressions.sequence(expressions.bytes(around.between), item),
                         low > 1 ? low - 1 : 0, high == kUnbounded ? kUnbounded : high - 1);
  const Node filled = expressions.sequence({opening, expressions.bytes(around.start), item, more,
                                            expressions.bytes(around.end), closing});
  return low > 0 ? filled : expressions.either(expressions.sequence(opening, closing), filled);
}

}  // namespace dlm::compile::schema
