// A program that holds every kernel against sums in double precision: each storage type, instruction set and
// shape, alone and in batches, with one thread and with several. For builds with sanitizers, and for processors
// that are emulated. `python csrc/build.py OUTPUT --check`, with `--sanitize` or `--target aarch64`.

#include <cstdio>
#include <ctime>
#include <sstream>

#include "check.h"

namespace check {

namespace {

int failures = 0;
constexpr int MOST_SHOWN = 40;

}  // namespace

void report(const std::string& where, const std::string& what) {
    if (++failures <= MOST_SHOWN) std::printf("%s: %s\n", where.c_str(), what.c_str());
}

std::mt19937& generator() {
    static std::mt19937 made(7);
    return made;
}

Floats normals(int64_t count, float deviation) {
    Floats out(count);
    for (float& number : out) {
        // A sum of four uniform numbers is near enough, and quick to have.
        const uint32_t a = generator()(), b = generator()();
        const auto sum = static_cast<double>((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16));
        number = deviation * static_cast<float>((sum / 65535.0 - 2.0) * std::sqrt(3.0));
    }
    return out;
}

void compare(const std::string& where, const Floats& found, const Doubles& expected, const Doubles& tolerance) {
    if (found.size() != expected.size()) return report(where, "another size");
    for (size_t i = 0; i < found.size(); ++i) {
        const double is = found[i], should = expected[i];
        if (std::isnan(should) ? std::isnan(is) : is == should || std::fabs(is - should) <= tolerance[i]) continue;
        return report(where, "number " + std::to_string(i) + " is " + std::to_string(is) + ", not " +
                                 std::to_string(should));
    }
}

void compare(const std::string& where, const Floats& found, const Doubles& expected, double tolerance) {
    Doubles each(expected.size());
    for (size_t i = 0; i < each.size(); ++i)
        each[i] = std::isfinite(expected[i]) ? tolerance * std::fmax(1.0, std::fabs(expected[i])) : 0.0;
    compare(where, found, expected, each);
}

void same(const std::string& where, const Floats& found, const Floats& expected) {
    if (found.size() != expected.size() || !bits_equal(found.data(), expected.data(), found.size()))
        report(where, "not the same bits");
}

double cut(double x, int bits, int least) {
    if (x == 0.0 || !std::isfinite(x)) return x;
    const int step = std::max(std::ilogb(x) + 1 - bits, least);
    return std::ldexp(std::nearbyint(std::ldexp(x, -step)), step);
}

}  // namespace check

// With any argument only the best instruction set is checked.
int main(int count, char**) {
    using namespace check;
    const auto timed = [](const std::string& name, auto run) {
        const std::clock_t start = std::clock();
        const int before = failures;
        run();
        const double took = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
        std::printf("%-28s %5.1f s of processor time, %d failures\n", name.c_str(), took, failures - before);
        std::fflush(stdout);
    };
    timed("packing", check_pack);
    timed("threads", check_pool);
    const std::pair<const char*, void (*)(const std::string&)> checks[] = {
        {"linear", check_linear}, {"plain weights", check_plain}, {"attention", check_attention},
        {"norms, activations", check_ops}, {"choosing tokens", check_draw}, {"programs", check_program},
    };
    std::stringstream isas(hp_isas());
    for (std::string isa; std::getline(isas, isa, ',');) {
        hp_use_isa(isa.c_str());
        for (const auto& check : checks) {
            const std::string name = isa + " " + check.first;
            timed(name, [&] { check.second(name); });
        }
        if (count > 1) break;
    }
    std::printf("%d failures\n", failures);
    return failures != 0;
}
