// Number of threads of the pool that run: fewer while another process holds the core of one of them.
//
// All threads wait for the slowest behind every operation. Where the slowest of T gets the fraction 1 - w of its core
// and the others 1 - r, a job advances at T (1 - w), and without the slowest at (T - 1) (1 - r). Where all lose alike
// more threads are still faster: a thread less would only hand its share to others. Results do not depend on the number.
#pragma once

#include <algorithm>

namespace llmbox {

// Times in seconds; only time inside jobs counts, so an idle engine learns and forgets nothing.
class ThreadThrottle {
public:
    explicit ThreadThrottle(int threads) : most_(threads), threads_(threads) {}

    int threads() const { return threads_; }

    // After a job of `wall` seconds, in which its slowest thread was kept from running for `worst` and each other
    // one for `rest`, on average.
    void report(double wall, double worst, double rest) {
        if (wall < SHORTEST) return;  // waking up would count as theft
        wall_ += wall;
        worst_ += std::min(worst, wall);
        rest_of_all_ += std::min(rest, wall);
        if (wall_ < window()) return;
        decide(wall_, 1 - worst_ / wall_, 1 - rest_of_all_ / wall_);
        wall_ = worst_ = rest_of_all_ = 0;
    }

private:
    static constexpr double SHORTEST = 0.0005, WINDOW = 0.1, TRIAL = 0.05;
    // The first rest is over after one or two steps, since most thieves are gone by then. A trial costs at most half of
    // its own time: a fortieth of the longest rest's work. Longer rests would miss the quiet after.
    static constexpr double FIRST_REST = 0.03, LONGEST_REST = 1;
    static constexpr double RELAPSE = 0.5;  // so soon after a thread came back its rest had been too short
    static constexpr double WORTH = 1.2;  // times as fast without the slowest, or nothing changes

    double window() const {
        if (threads_ < most_) return std::min(WINDOW, rest_);
        return tried_ && since_change_ == 0 ? TRIAL : WINDOW;
    }

    void decide(double seconds, double slowest, double others) {
        since_change_ += seconds;
        if (threads_ > 1 && (threads_ - 1) * others > WORTH * threads_ * slowest) {
            rest_ = tried_ && since_change_ < RELAPSE ? std::min(2 * rest_, LONGEST_REST) : FIRST_REST;
            change(-1);
        } else if (threads_ < most_ && since_change_ >= rest_) {
            change(+1);
        }
    }

    void change(int by) {
        threads_ += by;
        tried_ = by > 0;
        since_change_ = 0;
    }

    int most_, threads_;
    double wall_ = 0, worst_ = 0, rest_of_all_ = 0;  // of the window
    double since_change_ = 0, rest_ = FIRST_REST;
    bool tried_ = false;  // the last change brought a thread back
};

}  // namespace llmbox
