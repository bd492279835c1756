// A chat in C++, over the header dlm_runtime.hpp: converse BUNDLE NEW_TOKENS [MESSAGE...]
// Each message, or line of stdin, is answered as text is decided; then all are handed to a
// scheduler at once, and what they come to is compared. README.md says how it is built.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "dlm_runtime.hpp"

namespace {

namespace dlm = dlm_runtime;
using Lines = std::vector<std::string>;

Lines lines_of(int argc, char** argv) {
  if (argc > 3) return {argv + 3, argv + argc};
  Lines lines;
  for (std::string line; std::getline(std::cin, line);) lines.push_back(line);
  return lines;
}

// Answers one after the other, each printed as it is decided.
Lines answers(const dlm::Bundle& bundle, const Lines& lines, const dlm::GenerateOptions& options) {
  dlm::Session session(bundle);
  Lines out;
  for (const std::string& line : lines) {
    const auto print = [](std::string_view delta) {
      return static_cast<bool>(std::cout << delta << std::flush);
    };
    out.push_back(session.generate_chat({{"user", line}}, options, print));
    const dlm::Result result = session.result();
    std::cout << "\n  (" << result.nfe << " passes, " << result.completion_tokens << " tokens)\n";
  }
  return out;
}

// All at once, in passes that they share. Returns how many are not as before.
int differences(const dlm::Bundle& bundle, const Lines& lines, const Lines& before,
                const dlm::GenerateOptions& options) {
  const dlm::Text text = bundle.text();
  dlm::Scheduler scheduler(bundle);
  std::vector<dlm::Job> jobs;
  for (const std::string& line : lines)
    jobs.push_back(scheduler.submit(text.encode_chat({{"user", line}}), options));
  std::thread passes([&] { scheduler.run(true); });
  passes.join();
  int count = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const dlm::Result result = jobs[i].result();
    const std::vector<std::int32_t> tokens = jobs[i].tokens();
    const auto made = static_cast<std::size_t>(result.completion_tokens);
    count += text.decode(tokens.data() + result.prompt_tokens, made) != before[i];
  }
  std::cout << jobs.size() << " requests in " << scheduler.stats().passes << " shared passes, "
            << count << " not as alone\n";
  return count;
}

}  // namespace

int main(int argc, char** argv) {
  dlm::GenerateOptions options;
  options.max_new_tokens = argc > 2 ? std::atoi(argv[2]) : 0;
  if (options.max_new_tokens < 1) {
    std::cerr << "usage: converse BUNDLE NEW_TOKENS [MESSAGE...]\n";
    return 2;
  }
  try {
    const dlm::Bundle bundle(argv[1]);
    const Lines lines = lines_of(argc, argv);
    return differences(bundle, lines, answers(bundle, lines, options), options) == 0 ? 0 : 1;
  } catch (const dlm::Error& error) {
    std::cerr << "converse: " << dlm_status_name(error.status()) << ": " << error.what() << "\n";
    return 1;
  }
}
