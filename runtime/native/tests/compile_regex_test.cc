// Tests of the parsers of constraints: regular expressions, patterns of JSON Schema, formats,
// numbers, and hostile input.
//
// The library does not export the tested classes, so this program is compiled with the library's
// sources. Prints "N passed, N failed". The exit status is 1 if a check failed.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "compile/automata/automata.h"
#include "compile/json/ecma_pattern.h"
#include "compile/json/formats.h"
#include "compile/json/json_numbers.h"
#include "compile/json/json_text.h"
#include "compile/regex/regex.h"
#include "compile/regex/unicode.h"

namespace {

using namespace dlm;
using namespace dlm::compile;
using std::string;
using Make = std::function<Node(Expressions&)>;

int passed = 0, failed = 0;

void check(bool holds, int line, const string& what) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("compile_regex_test.cc:%d: failed: %s\n", line, what.c_str());
}
#define CHECK(condition) check((condition), __LINE__, #condition)

ByteAutomaton compiled(const Make& make, const Limits& limits = {}) {
  Budget budget(limits);
  Expressions expressions(budget);
  Automata automata(expressions);
  return automata.of(make(expressions));
}

// Returns the error message of a compilation, or "" if there is no error.
string refusal(const Make& make, const Limits& limits = {}) {
  try {
    compiled(make, limits);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

struct Case {
  int line;
  string source;
  std::vector<string> accepted, rejected;
};

void check_texts(const std::vector<Case>& cases, Node (*read)(Expressions&, std::string_view)) {
  for (const Case& each : cases) {
    const Make make = [&](Expressions& e) { return read(e, each.source); };
    if (const string why = refusal(make); !why.empty()) {
      check(false, each.line, each.source + ": " + why);
      continue;
    }
    const ByteAutomaton made = compiled(make);
    for (const string& text : each.accepted)
      check(made.matches(text), each.line, each.source + " accepts " + text);
    for (const string& text : each.rejected)
      check(!made.matches(text), each.line, each.source + " rejects " + text);
  }
}

Node read_regex(Expressions& e, std::string_view text) { return regex(e, text); }

void test_regex() {
  check_texts(
      {
          {__LINE__, "a|ab", {"a", "ab"}, {"", "b", "abb"}},
          {__LINE__, "(?i)\\x{DF}k", {"ßK", "ẞk", "ßK"}, {"ssk"}},
          {__LINE__, "[a-z&&[^aeiou]]+", {"xyz"}, {"xa", ""}},
          {__LINE__, "[\\w--\\d]", {"a", "é", "_"}, {"1", "-"}},
          {__LINE__, "\\p{Greek}\\pN\\P{Lu}", {"α1a"}, {"a1a", "α1A"}},
          {__LINE__, "\\p{sc!=Greek}", {"a"}, {"α"}},
          {__LINE__, "(?x) a b {2} # the end\n", {"abb"}, {"a b"}},
          {__LINE__, "(?-u:\\w)\\d", {"a٣", "a3"}, {"é3"}},
          {__LINE__, "(?m)^a$\n^b$", {"a\nb"}, {"a", "ab"}},
          {__LINE__, "(?mR)a$\r\n^b", {"a\r\nb"}, {"a\nb"}},
          {__LINE__, "(?:^a|b)+", {"a", "b", "abb"}, {"ba", "aa"}},
          {__LINE__, "\\ba\\B.\\b{end}", {"ab", "a_"}, {"a-", "a"}},
          {__LINE__, "(?s).{2}", {"\n\n", "éa", "\xF0\x9F\x98\x80x"}, {"a", "\xC3"}},
          {__LINE__, "a{0}b{2,3}?c*", {"bb", "bbbcc"}, {"b", "abb"}},
          {__LINE__, "", {""}, {"a"}},
      },
      read_regex);
  const std::vector<std::pair<string, string>> wrong = {
      {"a(b", "a group without its ) at character 1"},
      {"a)", "an unmatched ) at character 1"},
      {"é[a", "a [ without its ] at character 1"},
      {"*", "nothing to repeat at character 0"},
      {"a{2,1}", "a count whose end is below its start"},
      {"\\1", "a back-reference"},
      {"(?=a)", "look-around"},
      {"\\p{Klingon}", "a property that Unicode does not have, Klingon"},
      {"[z-a]", "a range whose end is below its start"},
      {"\\x{D800}", "an escape that names no character"},
      {"(?-u:\\W)", "a class of bytes beyond ASCII"},
      {"\xC3(", "it is not UTF-8"},
      {"(?q)", "a flag that is none of"},
  };
  for (const auto& [source, what] : wrong) {
    const string why = refusal([&, text = source](Expressions& e) { return regex(e, text); });
    check(why.rfind("regex: ", 0) == 0 && why.find(what) != string::npos, __LINE__,
          source + ": " + why);
  }
}

Node found_in_string(Expressions& expressions, std::string_view pattern) {
  return pattern_in_string(expressions, pattern, Found::surely);
}
Node perhaps_in_string(Expressions& expressions, std::string_view pattern) {
  return pattern_in_string(expressions, pattern, Found::perhaps);
}
Node found_in_text(Expressions& expressions, std::string_view pattern) {
  return pattern_in_text(expressions, pattern, Found::surely);
}

void test_patterns() {
  check_texts(
      {
          {__LINE__, "b", {"abc", "b"}, {"a", ""}},
          {__LINE__, "^a$|^b", {"a", "bc"}, {"ab", "cb"}},
          {__LINE__, "^[^\"]$", {"a", "\\n", "\\\\"}, {"\\\"", "\n"}},
          {__LINE__,
           "^\\u00e9\\u{1F600}\\uD83D\\uDE00$",
           {"é\xF0\x9F\x98\x80\xF0\x9F\x98\x80"},
           {""}},
          {__LINE__, "^[\\w-.]+\\-\\_$", {"a.b--_"}, {"a+-_"}},
          {__LINE__, "^(?!.*--)[a-z-]+(?<!-)$", {"a-b", "ab"}, {"a--b", "a-"}},
          {__LINE__, "^[a-z\\d](?:[a-z\\d]|-(?=[a-z\\d])){0,38}$", {"a-b-c"}, {"a-", "-a", "a--b"}},
          {__LINE__, "(^|,)x(,|$)", {"x", "a,x,b"}, {"ax", "xa"}},
          {__LINE__, "\\bcat\\b", {"a cat!", "cat"}, {"cats", "scat"}},
          {__LINE__, "^(?:a(?=b|$)|b)*$", {"abab", "ba"}, {"aab"}},
          {__LINE__, "[]", {}, {"", "a"}},
          {__LINE__, "^{a}$", {"{a}"}, {"a"}},
          {__LINE__, "^(?i:A)b$", {"ab", "Ab"}, {"AB"}},
      },
      found_in_string);
  check_texts(
      {
          {__LINE__, "^.$", {"a", "\\r", "\xE2\x80\xA8"}, {"\\n", "ab"}},
          {__LINE__, "^a$", {"a", "a\\n"}, {"aa"}},
          {__LINE__, "^\\d\\w$", {"1a", "\xD9\xA1\xC3\xA9"}, {"a1"}},
          {__LINE__, "^\\D$", {"a", "\xD9\xA1"}, {"1"}},
          {__LINE__, "a\\b", {"a-", "a\xC3\xA9"}, {"ab"}},
      },
      perhaps_in_string);
  check_texts(
      {
          {__LINE__, "^.$", {"a"}, {"\\r", "\xE2\x80\xA8", "\\n"}},
          {__LINE__,
           "^[^\\d]\\D\\W$",
           {"aa-"},
           {"\xD9\xA1"
            "aa-",
            "a\xD9\xA1-", "aa\xC3\xA9"}},
          {__LINE__, "^(?!.*a$).*$", {"b"}, {"a", "a\\n"}},
          {__LINE__, "a\\b", {"a-"}, {"ab", "a\xC3\xA9"}},
          {__LINE__,
           "^\\s\\S$",
           {" a",
            "\xC2\xA0"
            "a"},
           {"\xEF\xBB\xBF"
            "a"}},
      },
      found_in_string);
  for (const string source : {"(", ")", "[", "a**", "^*", "\\1", "\\k<a>", "(?<=ab)c", "(?>a)",
                              "\\Z", "\\u12", "[b-a]", "(?:(?=ab)a)*", "\\p{Nope}", "a{,3}"}) {
    const string why = refusal([&](Expressions& e) { return found_in_string(e, source); });
    check(why.rfind("pattern \"", 0) == 0, __LINE__, source + ": " + why);
  }
}

void test_formats() {
  check_texts(
      {
          {__LINE__,
           "date",
           {"2000-02-29", "0004-02-29", "9999-12-31"},
           {"1900-02-29", "0000-01-01", "2023-02-29", "2023-04-31"}},
          {__LINE__,
           "time",
           {"23:59:59.5Z", "00:00:00-23:59"},
           {"24:00:00Z", "23:59:60Z", "00:00:00"}},
          {__LINE__, "duration", {"P1Y2M3DT4H5M6S", "P2W", "PT5M"}, {"P", "PT", "P1Y2W", "P1Y1D"}},
          {__LINE__,
           "hostname",
           {"a-b.c", string(63, 'a')},
           {"-a", "a.", "ab--c", string(64, 'a')}},
          {__LINE__, "ipv4", {"0.0.0.0", "255.1.2.3"}, {"256.1.1.1", "01.1.1.1"}},
          {__LINE__,
           "ipv6",
           {"::", "1::", "::ffff:1.2.3.4", "1:2:3:4:5:6:7:8"},
           {"1::2::3", "1:2", "::1%a"}},
          {__LINE__, "email", {"a.b+c@d.e"}, {"a..b@d.e", "a@d", string(65, 'a') + "@b.c"}},
          {__LINE__, "idn-email", {"실례@실례.테스트"}, {"@a.b"}},
          {__LINE__,
           "uri",
           {"https://a.b:80/c?d#e", "urn:x:y", "http://[::1]/"},
           {"//a", "a", "http://a b", "a:%0"}},
          {__LINE__, "uri-reference", {"", "/a", "?q", "a/b:c"}, {"1a:b", "\\\\a"}},
          {__LINE__, "iri", {"http://é.ß/é"}, {"é:a"}},
          {__LINE__, "uri-template", {"/a{?b*,c:3}"}, {"{", "{a", "}"}},
          {__LINE__, "json-pointer", {"", "/a~0~1/", "/\\\""}, {"a", "/~", "/~2"}},
          {__LINE__, "relative-json-pointer", {"0#", "10/a"}, {"/a", "01", "0a"}},
          {__LINE__, "regex", {"^(a|[a-z]{2})+$", "\\\\d"}, {"(", "a**"}},
          {__LINE__,
           "uuid",
           {"2EB8AA08-AA98-11EA-B4AA-73B441D16380"},
           {"2eb8aa08aa9811eab4aa73b441d16380"}},
      },
      [](Expressions& e, std::string_view name) { return format_in_string(e, name, false); });
  CHECK(is_format("idn-hostname") && !is_format("color") && !is_format(""));
}

Node read_numbers(Expressions& e, std::string_view source) {  // "low high multiple"; "-" means that
                                                              // a number is missing
  NumberRange range;
  std::vector<string> parts(1);
  for (const char letter : source)
    if (letter == ' ')
      parts.emplace_back();
    else
      parts.back() += letter;
  const auto bound = [](string text, bool& is_excluded) -> std::optional<Decimal> {
    if (text == "none") return std::nullopt;
    is_excluded = text[0] == '(';
    return Decimal::parse(is_excluded ? text.substr(1) : text);
  };
  range.low = bound(parts[0], range.low_excluded);
  range.high = bound(parts[1], range.high_excluded);
  range.integers = parts.size() > 2 && parts[2] == "int";
  if (parts.size() > 3) range.multiples.push_back(Decimal::parse(parts[3]));
  return numbers(e, range);
}

void test_numbers() {
  check_texts(
      {
          {__LINE__, "-5 12 int", {"-5", "0", "12"}, {"-6", "13", "-0", "01", "1.0"}},
          {__LINE__,
           "(-0.5 1.25 num",
           {"-0.49", "1.25", "1.250", "0"},
           {"-0.5", "1.26", "1.2501", "-0"}},
          {__LINE__,
           "9223372036854775808 none int",
           {"9223372036854775808"},
           {"9223372036854775807"}},
          {__LINE__,
           "none (1e15 num",
           {"999999999999990", "-1.5"},
           {"1000000000000000", "999999999999999.9"}},
          {__LINE__, "0.0000001 1 num", {"0.0000001", "0.5"}, {"0.00000001", "0"}},
          {__LINE__, "none none int 7", {"0", "7", "-14", "700000007"}, {"8", "70.0"}},
          {__LINE__, "none none int 1e3", {"0", "5000"}, {"500", "0000"}},
          {__LINE__, "none none num 0.25", {"0.25", "-1.5", "3"}, {"0.2", "1e2"}},
          {__LINE__, "0 10 num 0.01", {"0.06", "9.99", "3"}, {"0.07", "0.001"}},
          {__LINE__, "5 4 int", {}, {"5", "4"}},
      },
      read_numbers);
  const auto value = [](const char* text) { return Decimal::parse(text); };
  CHECK(value("1.50").compare(value("15e-1")) == 0 && value("-0").compare(value("0.0")) == 0);
  CHECK(value("-2").compare(value("1")) < 0 && value("1e400").compare(value("1e399")) > 0);
  CHECK(value("-10").compare(value("-9")) < 0 && value("100").is_integer() &&
        !value("0.1").is_integer());
  CHECK(!refusal([](Expressions& e) { return read_numbers(e, "1e999999 none num"); }).empty());
  CHECK(json_string("a\"\n\x01é") == "\"a\\\"\\n\\u0001é\"");
}

void test_unicode() {
  CHECK(contains(*unicode_property("Lu"), 'A') && !contains(*unicode_property("Lu"), 'a'));
  CHECK(unicode_property("is greek") == unicode_property("Script", "Grek"));
  CHECK(!unicode_property("Klingon") && !unicode_property("sc", "Klingon"));
  CHECK(joined(*unicode_property("L"), *unicode_property("gc", "M")).size() > 100);
  CHECK(unicode_property("Any") == complement({}));
  CHECK(intersection(*unicode_property("age", "5.0"), *unicode_property("Age", "V16_0")) ==
        *unicode_property("age", "5.0"));
  CHECK(with_all_cases({{'k', 'k'}}) == (CodePoints{{'K', 'K'}, {'k', 'k'}, {0x212A, 0x212A}}));
  for (const char* category : {"Lu", "Ll", "Lt", "Lm", "Lo"})
    CHECK(intersection(*unicode_property(category), complement(*unicode_property("L"))).empty());
}

// Deep, long, repetitive or truncated input must give an error, or an automaton within the limits.
void test_hostile_input() {
  Limits limits;
  limits.seconds = 0.5;
  limits.memory_bytes = 256 << 20;
  const auto repeated = [](const string& text, int times) {
    string made;
    for (int i = 0; i < times; ++i) made += text;
    return made;
  };
  const std::vector<string> sources = {
      repeated("(", 100000),
      repeated("(", 100000) + repeated(")", 100000),
      repeated("(?:a|", 200) + repeated(")", 200),
      repeated("[", 100000),
      repeated("[^a", 300),
      repeated("a?", 20000) + repeated("a", 200),
      repeated("(?:", 240) + "a" + repeated("{2}){2}", 240),
      repeated("(?:\\b", 240) + "a" + repeated(")*", 240),
      repeated("(?:^", 200) + "a" + repeated("|b$){1,3}", 200),
      repeated("\\b", 50000),
      repeated("a\\b|", 5000),
      "(?:\\b\\w{1,999}){1,999}",
      "a{1000000}{1000000}",
      "(?:a{1,1000000}){1,1000000}",
      repeated("(?i)[\\w\\p{Lu}]", 500),
      repeated("(?=.*a)", 200) + "b",
      repeated("(?!a", 200) + repeated(")", 200),
      repeated("(?=a|", 200) + repeated(")*", 200),
      "\\",
      "\\x",
      "\\x{",
      "\\u{FFFFFFFFF}",
      "\\p",
      "\\p{",
      "(?",
      "(?<",
      "(?<a",
      "[a-",
      "[\\",
      "a{",
      "a{1,",
      "\xFF\xFE",
      "\xED\xA0\x80",
      string("a\0b", 3),
      "{",
      "}",
      "]",
      "(?i",
      "(?-",
      "[[:",
      "\\c",
      "\\k",
  };
  for (const string& source : sources) {
    const string name = source.substr(0, 40);
    for (const auto& read : {read_regex, found_in_string, perhaps_in_string, found_in_text}) {
      const string why =
          refusal([&, &read = read](Expressions& e) { return read(e, source); }, limits);
      check(why.size() < 2000, __LINE__, name);
    }
  }
  std::mt19937 random(1);
  const string letters = "ab()[]{}?*+|^$\\.-,0129:=!<>#&~ipPuUxbBdDwWsSmRz\"/\n\xC3\xA9";
  for (int round = 0; round < 3000; ++round) {
    string source;
    const size_t size = random() % 30;
    while (source.size() < size) source += letters[random() % letters.size()];
    for (const auto& read : {read_regex, found_in_string, perhaps_in_string}) {
      const string why =
          refusal([&, &read = read](Expressions& e) { return read(e, source); }, limits);
      check(why.size() < 2000, __LINE__, source);
    }
  }
}

}  // namespace

int main() {
  test_regex();
  test_patterns();
  test_formats();
  test_numbers();
  test_unicode();
  test_hostile_input();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
