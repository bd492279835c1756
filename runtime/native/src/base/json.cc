// A recursive descent parser for the grammar of RFC 8259. base/json.h lists the texts that the
// parser rejects.
#include "base/json.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/error.h"
#include "base/utf8.h"

namespace dlm::json {
namespace {

// Formats a number for messages. Returns the shortest text that parses to the same number.
std::string shown(double number) {
  char text[40];
  const auto end = std::to_chars(text, text + sizeof text, number).ptr;
  return std::string(text, end);
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Returns true if the key needs no quotes in a path such as presets[0].block_length.
bool is_plain(std::string_view key) {
  const auto is_word = [](char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  return !key.empty() && key.size() <= 60 && std::all_of(key.begin(), key.end(), is_word);
}

}  // namespace

std::string quoted(std::string_view text) {
  constexpr size_t kMost = 60;
  std::string out = "\"";
  for (const char c : text) {
    char escaped[8];
    const char* const format = c == '"' || c == '\\'   ? "\\%c"
                               : c >= 0x20 && c < 0x7F ? "%c"
                                                       : "\\x%02x";
    std::snprintf(escaped, sizeof escaped, format, static_cast<unsigned char>(c));
    if (out.size() + std::strlen(escaped) > kMost) return out + "...\"";
    out += escaped;
  }
  return out + "\"";
}

class Reader {
 public:
  Reader(std::string_view text, int max_depth) : text_(text), max_depth_(max_depth) {}

  void document(Value& root) {
    space();
    value(root, 0);
    space();
    if (!text_.empty()) error("expected the end of the text, found " + here());
    link(root);
  }

 private:
  std::string_view text_;  // the part of the text that is not parsed yet
  const int max_depth_;
  int32_t line_ = 1;

  [[noreturn]] void error(const std::string& what) const { error_at(line_, what); }
  [[noreturn]] static void error_at(int32_t line, const std::string& what) {
    throw Error(DLM_BAD_BUNDLE, "line " + std::to_string(line) + ": " + what);
  }
  std::string here() const {
    return text_.empty() ? "the end of the text" : quoted(text_.substr(0, text_.find('\n')));
  }

  void space() {
    while (!text_.empty() &&
           (text_[0] == ' ' || text_[0] == '\t' || text_[0] == '\r' || text_[0] == '\n')) {
      line_ += text_[0] == '\n';
      text_.remove_prefix(1);
    }
  }

  bool take(std::string_view word) {
    if (text_.substr(0, word.size()) != word) return false;
    text_.remove_prefix(word.size());
    return true;
  }

  void value(Value& out, int depth) {
    out.line_ = line_;
    const char first = text_.empty() ? '\0' : text_[0];
    if (first == '{' || first == '[') {
      container(out, depth);
    } else if (first == '"') {
      out.kind_ = Value::Kind::string;
      string(out.text_);
    } else if (first == '-' || is_digit(first)) {
      number(out);
    } else if (take("true") || take("false")) {
      out.kind_ = Value::Kind::boolean;
      out.truth_ = first == 't';
    } else if (!take("null")) {
      error("expected a value, found " + here());
    }
  }

  void container(Value& out, int depth) {
    if (depth == max_depth_) error("nested deeper than " + std::to_string(max_depth_) + " levels");
    const bool is_object = text_[0] == '{';
    const char* const close = is_object ? "}" : "]";
    out.kind_ = is_object ? Value::Kind::object : Value::Kind::array;
    text_.remove_prefix(1);
    space();
    if (take(close)) return;
    for (;;) {
      Value item;
      if (is_object) {
        if (text_.empty() || text_[0] != '"')
          error("expected a key in double quotes, found " + here());
        string(item.key_);
        space();
        if (!take(":"))
          error("expected ':' after the key " + quoted(item.key_) + ", found " + here());
        space();
      }
      value(item, depth + 1);
      out.items_.push_back(std::move(item));
      space();
      if (take(close)) break;
      if (!take(",")) error(std::string("expected ',' or '") + close + "', found " + here());
      space();
    }
    if (is_object) refuse_duplicates(out);
  }

  // Throws an error if two members have the same key. Sorts the keys first, so an object with n
  // keys needs only about n log n comparisons.
  static void refuse_duplicates(const Value& object) {
    std::vector<const Value*> order;
    order.reserve(object.items_.size());
    for (const Value& item : object.items_) order.push_back(&item);
    std::sort(order.begin(), order.end(),
              [](const Value* a, const Value* b) { return a->key_ < b->key_; });
    for (size_t i = 1; i < order.size(); ++i) {
      const Value &one = *order[i - 1], &other = *order[i];
      if (one.key_ != other.key_) continue;
      error_at(std::max(one.line_, other.line_), "the key " + quoted(one.key_) + " occurs twice");
    }
  }

  void string(std::string& out) {
    text_.remove_prefix(1);
    for (;;) {
      if (text_.empty()) error("a string is not closed: it starts with " + quoted(out));
      const char c = text_[0];
      if (c == '"') break;
      if (c == '\\') {
        escape(out);
      } else if (static_cast<unsigned char>(c) < 0x20) {
        error("a control character in a string must be escaped: " + here());
      } else {
        const Utf8Start start = utf8_start(text_);
        if (start.kind != Utf8Start::whole) error("invalid UTF-8: " + here());
        out.append(text_.substr(0, start.bytes));
        text_.remove_prefix(start.bytes);
      }
    }
    text_.remove_prefix(1);
  }

  void escape(std::string& out) {
    static constexpr char kNames[] = "\"\\/bfnrt", kMeanings[] = "\"\\/\b\f\n\r\t";
    const std::string_view from = text_;
    const char name = text_.size() < 2 ? '\0' : text_[1];
    if (name == 'u') {
      uint32_t code = unit(from);
      if (code >= 0xD800 && code <= 0xDBFF && text_.substr(0, 2) == "\\u") {
        const uint32_t low = unit(from);
        if (low < 0xDC00 || low > 0xDFFF)
          error("unpaired surrogate: " + quoted(from.substr(0, 12)));
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      }
      if (code >= 0xD800 && code <= 0xDFFF)
        error("unpaired surrogate: " + quoted(from.substr(0, 6)));
      if (code == 0) error("a string contains NUL: " + quoted(from.substr(0, 6)));
      append_char(code, out);
      return;
    }
    const char* const found = name == '\0' ? nullptr : std::strchr(kNames, name);
    if (found == nullptr) error("unknown escape: " + quoted(from.substr(0, 2)));
    out.push_back(kMeanings[found - kNames]);
    text_.remove_prefix(2);
  }

  // Parses the four hex digits after \u.
  uint32_t unit(std::string_view from) {
    uint32_t code = 0;
    const char* const digits = text_.data() + 2;
    if (text_.size() < 6 || std::from_chars(digits, digits + 4, code, 16).ptr != digits + 4) {
      error("expected four hex digits: " + quoted(from.substr(0, 12)));
    }
    text_.remove_prefix(6);
    return code;
  }

  void number(Value& out) {
    size_t end = text_[0] == '-' ? 1 : 0;
    const auto digits = [&] {
      const size_t start = end;
      while (end < text_.size() && is_digit(text_[end])) ++end;
      if (end == start) error("not a number: " + here());
    };
    const size_t whole = end;
    digits();
    if (text_[whole] == '0' && end > whole + 1) error("a number starts with 0: " + here());
    bool is_integer = true;
    if (end < text_.size() && text_[end] == '.') {
      is_integer = false, ++end;
      digits();
    }
    if (end < text_.size() && (text_[end] == 'e' || text_[end] == 'E')) {
      is_integer = false, ++end;
      if (end < text_.size() && (text_[end] == '+' || text_[end] == '-')) ++end;
      digits();
    }
    out.kind_ = Value::Kind::number;
    out.text_ = text_.substr(0, end);
    const char* const first = out.text_.data();
    const char* const last = first + out.text_.size();
    // Do not use strtod, because its result depends on the locale.
    if (std::from_chars(first, last, out.number_).ec != std::errc())
      error("out of range for a double: " + quoted(out.text_));
    out.is_integer_ = is_integer && std::from_chars(first, last, out.integer_).ec == std::errc();
    text_.remove_prefix(end);
  }

  static void link(Value& value) {
    for (Value& item : value.items_) {
      item.parent_ = &value;
      link(item);
    }
  }
};

std::string Value::path() const {
  std::string out;
  for (const Value* value = this; value->parent_ != nullptr; value = value->parent_) {
    std::string step;
    if (value->parent_->kind_ == Kind::array) {
      step = "[" + std::to_string(value - value->parent_->items_.data()) + "]";
    } else {
      step = value->parent_->parent_ != nullptr ? "." : "";
      step += is_plain(value->key_) ? value->key_ : quoted(value->key_);
    }
    out.insert(0, step);
    // Deep nesting makes paths long. Only the end of a long path is useful in a message.
    if (out.size() > 240) return "..." + out;
  }
  return out.empty() ? "the document" : out;
}

void Value::refuse(const std::string& reason) const {
  throw Error(DLM_BAD_BUNDLE, path() + ": " + reason);
}

std::string Value::found() const {
  if (kind_ == Kind::number) return text_.size() <= 60 ? text_ : text_.substr(0, 57) + "...";
  if (kind_ == Kind::string) return quoted(text_);
  if (kind_ == Kind::boolean) return truth_ ? "true" : "false";
  return kind_ == Kind::null ? "null" : kind_ == Kind::array ? "an array" : "an object";
}

void Value::expected(const std::string& what) const {
  refuse("expected " + what + ", found " + found());
}

bool Value::boolean() const {
  if (kind_ != Kind::boolean) expected("true or false");
  return truth_;
}

double Value::number(double low, double high) const {
  if (kind_ != Kind::number || number_ < low || number_ > high) {
    expected("a number in " + shown(low) + ".." + shown(high));
  }
  return number_;
}

int64_t Value::integer(int64_t low, int64_t high) const {
  if (!is_integer_ || integer_ < low || integer_ > high) {
    expected("an integer in " + std::to_string(low) + ".." + std::to_string(high));
  }
  return integer_;
}

const std::string& Value::string() const {
  if (kind_ != Kind::string) expected("a string");
  return text_;
}

const std::vector<Value>& Value::elements() const {
  if (kind_ != Kind::array) expected("an array");
  return items_;
}

const std::vector<Value>& Value::members() const {
  if (kind_ != Kind::object) expected("an object");
  return items_;
}

const Value* Value::find(std::string_view key) const {
  for (const Value& member : members()) {
    if (member.key_ == key) return &member;
  }
  return nullptr;
}

const Value& Value::at(std::string_view key) const {
  const Value* const member = find(key);
  if (member == nullptr) refuse("the key " + quoted(key) + " is missing");
  return *member;
}

const Value& Value::object(std::string_view key) const {
  const Value& member = at(key);
  member.members();
  return member;
}

std::string Value::canonical(std::string_view without) const {
  std::string out;
  append_canonical(out, without);
  return out;
}

void Value::append_canonical(std::string& out, std::string_view without) const {
  const auto append_text = [&](const std::string& text) {
    out += '"';
    for (const char c : text) {
      if (c < ' ' || c > '~') refuse("must be printable ASCII, found " + quoted(text));
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
    out += '"';
  };
  if (kind_ == Kind::null) out += "null";
  if (kind_ == Kind::boolean) out += truth_ ? "true" : "false";
  if (kind_ == Kind::number) out += std::to_string(integer(INT64_MIN, INT64_MAX));
  if (kind_ == Kind::string) append_text(text_);
  if (kind_ != Kind::array && kind_ != Kind::object) return;
  std::vector<const Value*> items;
  for (const Value& item : items_)
    if (without.empty() || item.key_ != without) items.push_back(&item);
  if (kind_ == Kind::object)
    std::sort(items.begin(), items.end(),
              [](const Value* a, const Value* b) { return a->key_ < b->key_; });
  out += kind_ == Kind::array ? '[' : '{';
  for (const Value* const item : items) {
    if (item != items.front()) out += ',';
    if (kind_ == Kind::object) append_text(item->key_), out += ':';
    item->append_canonical(out, {});
  }
  out += kind_ == Kind::array ? ']' : '}';
}

void Value::refuse_unknown(const std::vector<std::string_view>& known) const {
  for (const Value& member : members()) {
    if (std::find(known.begin(), known.end(), member.key_) != known.end()) continue;
    member.refuse("unknown key; written by a newer dlm-export?");
  }
}

std::unique_ptr<const Value> parse(std::string_view text, size_t max_bytes, int max_depth) {
  if (text.size() > max_bytes) {
    fail(DLM_BAD_BUNDLE, "line 1: the text has %zu bytes; the limit is %zu", text.size(),
         max_bytes);
  }
  auto root = std::make_unique<Value>();
  Reader(text, max_depth).document(*root);
  return root;
}

}  // namespace dlm::json
