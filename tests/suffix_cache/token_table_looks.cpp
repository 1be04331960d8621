// Reads token ids, puts them into a TokenTable in turn, and prints how many entries that looked at.
#include <iostream>
#include <iterator>
#include <vector>

#include "token_table.hpp"

int main() {
    const std::vector<sglang_hvd::Token> tokens(std::istream_iterator<sglang_hvd::Token>(std::cin), {});
    sglang_hvd::TokenTable table;
    table.clear(tokens.size());
    std::size_t num_looks = 0;
    for (std::uint32_t number = 1; const auto token : tokens) {
        num_looks += table.num_looks(token);
        if (table[token] != 0) return 1;
        table[token] = number++;
    }
    for (std::uint32_t number = 1; const auto token : tokens) {
        if (table[token] != number++) return 2;
    }
    std::cout << num_looks;
}
