"""The loop of CleanRL's ppo.py: each iteration plays, then trains on shuffled parts of what was played."""

import gymnasium
import numpy as np
import torch
from shared import tell

torch.manual_seed(1)
environment = gymnasium.make("CartPole-v1")
agent = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
observation, _ = environment.reset(seed=1)
for iteration in range(8):
    optimizer.param_groups[0]["lr"] = 2.5e-4 * (1 - iteration / 8)
    played = []
    for _ in range(128):
        with torch.no_grad():
            *logits, value = agent(torch.as_tensor(observation))
            choice = torch.distributions.Categorical(logits=torch.stack(logits))
            action = choice.sample()
        following, reward, ended, cut, _ = environment.step(int(action))
        played.append((observation, int(action), float(choice.log_prob(action)), reward, float(value)))
        observation = environment.reset()[0] if ended or cut else following
    states, actions, chances, rewards, values = (torch.tensor(np.array(part)) for part in zip(*played, strict=True))
    advantages = (rewards - values).float()
    order = np.arange(128)
    for epoch in range(4):
        np.random.shuffle(order)
        for part in np.split(order, 4):
            out = agent(states[part].float())
            chosen = torch.distributions.Categorical(logits=out[:, :2]).log_prob(actions[part])
            ratio = (chosen - chances[part].float()).exp()
            loss = -(advantages[part] * ratio).mean() + (out[:, 2] - rewards[part].float()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
torch.save(agent.state_dict(), "agent.pt")
tell(agent, 0.0, 0.0)
